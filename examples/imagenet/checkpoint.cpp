#include "examples/imagenet/checkpoint.h"

#include <charconv>
#include <filesystem>
#include <torch/types.h>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"
#include "cohort/train/checkpoint.h"

namespace imagenet {
namespace {

namespace fs = std::filesystem;
using cohort::ConfigError;

constexpr const char* kOptimizerStart = "optimizer-";

at::Tensor momentum_of(torch::optim::SGD& sgd, const at::Tensor& parameter) {
  const auto& state = sgd.state();
  const auto found = state.find(parameter.unsafeGetTensorImpl());
  if (found == state.end()) return {};
  return static_cast<const torch::optim::SGDParamState&>(*found->second).momentum_buffer();
}

void write_momentum(const std::string& path, const torch::nn::Module& model,
                    torch::optim::SGD& sgd) {
  std::vector<cohort::TensorView> views;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor momentum = momentum_of(sgd, item.value());
    if (!momentum.defined()) continue;
    views.push_back(
        {.name = item.key(),
         .dtype = momentum.scalar_type() == at::kDouble ? cohort::DType::kF64 : cohort::DType::kF32,
         .shape = momentum.sizes().vec(),
         .bytes = {static_cast<const std::byte*>(momentum.const_data_ptr()), momentum.nbytes()}});
  }
  cohort::write_safetensors(path, views);
}

// A file of its own, read by the name in the manifest.
void read_momentum(const std::string& path, const torch::nn::Module& model,
                   torch::optim::SGD& sgd) {
  const cohort::SafetensorsFile file(path);
  for (const auto& item : model.named_parameters()) {
    const cohort::TensorView* stored = file.find(item.key());
    if (stored == nullptr) continue;  // Saved before its first step.
    const at::Tensor& parameter = item.value();
    if (stored->shape != parameter.sizes().vec() || stored->bytes.size() != parameter.nbytes()) {
      throw ConfigError(path + ": momentum of another model: " + item.key());
    }
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(at::from_blob(const_cast<std::byte*>(stored->bytes.data()),
                                         parameter.sizes(), parameter.detach().options())
                               .clone());
    sgd.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
}

std::string fact(const cohort::train::Facts& facts, const std::string& folder,
                 const std::string& key) {
  const auto found = facts.find(key);
  if (found == facts.end()) {
    throw ConfigError(folder + "/manifest.json: no checkpoint of imagenet: " + key + " is missing");
  }
  return found->second;
}

std::string exact(double number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

}  // namespace

void save_run(const std::string& folder, const torch::nn::Module& model, torch::optim::SGD& sgd,
              const RunState& state) {
  std::error_code error;
  fs::create_directories(folder, error);
  const std::string name = kOptimizerStart + std::to_string(state.epochs_done) + ".safetensors";
  write_momentum(folder + "/" + name, model, sgd);
  cohort::train::save_checkpoint(
      folder, model, state.epochs_done,
      {{"arch", state.arch},
       {"epochs_done", std::to_string(state.epochs_done)},
       {"best_top1", exact(state.best_top1)},
       {"optimizer", name},
       {"optimizer_sha256", cohort::sha256_of_file(folder + "/" + name)}});
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string other = entry.path().filename().string();
    if (other.starts_with(kOptimizerStart) && other != name) fs::remove(entry.path(), error);
  }
}

RunState read_run(const std::string& folder) {
  const auto facts = cohort::train::read_manifest(folder);
  RunState state{.arch = fact(facts, folder, "arch")};
  const auto read = [&](const std::string& key, auto& number) {
    const std::string text = fact(facts, folder, key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw ConfigError(folder + "/manifest.json: " + key + ": expected a number, found " + text);
    }
  };
  read("epochs_done", state.epochs_done);
  read("best_top1", state.best_top1);
  return state;
}

void load_run(const std::string& folder, torch::nn::Module& model, torch::optim::SGD& sgd) {
  cohort::train::load_checkpoint(folder, model);
  const auto facts = cohort::train::read_manifest(folder);
  const std::string path = folder + "/" + fact(facts, folder, "optimizer");
  if (!fs::exists(path)) throw ConfigError(path + ": missing, though manifest.json names it");
  if (cohort::sha256_of_file(path) != fact(facts, folder, "optimizer_sha256")) {
    throw ConfigError(path + ": its SHA-256 is not the one in manifest.json: the file was changed");
  }
  read_momentum(path, model, sgd);
}

}  // namespace imagenet
