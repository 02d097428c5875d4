#include "examples/imagenet/checkpoint.h"

#include <array>
#include <charconv>
#include <memory>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/train/checkpoint.h"

namespace imagenet {
namespace {

using cohort::ConfigError;

// One tensor per parameter; a parameter that has taken no step yet has zeros, which come to the
// same.
cohort::train::NamedTensors momentum_of(const torch::nn::Module& model, torch::optim::SGD& sgd) {
  cohort::train::NamedTensors momentum;
  for (const auto& item : model.named_parameters()) {
    auto& state = sgd.state()[item.value().unsafeGetTensorImpl()];
    if (!state) state = std::make_unique<torch::optim::SGDParamState>();
    auto& own = static_cast<torch::optim::SGDParamState&>(*state);
    if (!own.momentum_buffer().defined())
      own.momentum_buffer(at::zeros_like(item.value().detach()));
    momentum.emplace_back(item.key(), own.momentum_buffer());
  }
  return momentum;
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
  cohort::train::save_checkpoint(
      folder, {{"weights", cohort::train::state_of(model)}, {"optimizer", momentum_of(model, sgd)}},
      state.epochs_done,
      {{"arch", state.arch},
       {"epochs_done", std::to_string(state.epochs_done)},
       {"best_top1", exact(state.best_top1)}});
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
  cohort::train::load_checkpoint(folder, {{"weights", cohort::train::state_of(model)},
                                          {"optimizer", momentum_of(model, sgd)}});
}

}  // namespace imagenet
