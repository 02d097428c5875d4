#include "cohort/train/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <torch/types.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kShort:
      return DType::kI16;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    default:
      TORCH_CHECK_VALUE(false, "checkpoint: tensors of type ", tensor.dtype(), " are not written");
  }
}

std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& model) {
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (const auto& item : model.named_parameters()) {
    state.emplace_back(item.key(), item.value().detach().contiguous());
  }
  for (const auto& item : model.named_buffers()) {
    state.emplace_back(item.key(), item.value().detach().contiguous());
  }
  return state;
}

TensorView view_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name,
          .dtype = dtype_of(tensor),
          .shape = tensor.sizes().vec(),
          .bytes = {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()}};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream out;
  out << at::IntArrayRef(shape);
  return out.str();
}

nlohmann::json read_json(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  std::ifstream file(path);
  if (!file) throw ConfigError(path + ": no checkpoint here");
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("weights") || !json["weights"].is_string() ||
      !json.contains("sha256") || !json["sha256"].is_string() || !json.contains("facts") ||
      !json["facts"].is_object()) {
    throw ConfigError(path + ": expected a manifest with weights, sha256 and facts");
  }
  return json;
}

}  // namespace

void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Facts& facts) {
  std::error_code error;
  fs::create_directories(folder, error);
  const auto state = named_state(model);
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : state) views.push_back(view_of(name, tensor));
  const std::string name = "weights-" + std::to_string(update) + ".safetensors";
  write_safetensors(folder + "/" + name, views, {{"format", "pt"}});
  const nlohmann::ordered_json manifest = {
      {"weights", name}, {"sha256", sha256_of_file(folder + "/" + name)}, {"facts", facts}};
  write_atomically(folder + "/manifest.json", manifest.dump(2) + "\n");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string other = entry.path().filename().string();
    if (other.starts_with("weights-") && other != name) fs::remove(entry.path(), error);
  }
}

Facts read_manifest(const std::string& folder) {
  const nlohmann::json manifest = read_json(folder);
  Facts facts;
  for (const auto& [key, value] : manifest["facts"].items()) {
    if (!value.is_string())
      throw ConfigError(folder + "/manifest.json: " + key + ": expected a text");
    facts[key] = value.get<std::string>();
  }
  return facts;
}

void load_checkpoint(const std::string& folder, torch::nn::Module& model) {
  const nlohmann::json manifest = read_json(folder);
  const std::string path = folder + "/" + manifest["weights"].get<std::string>();
  const SafetensorsFile file(path);
  if (sha256_of_file(path) != manifest["sha256"].get<std::string>()) {
    throw ConfigError(path + ": its SHA-256 is not the one in manifest.json: the file was changed");
  }
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (auto& item : model.named_parameters()) state.emplace_back(item.key(), item.value());
  for (auto& item : model.named_buffers()) state.emplace_back(item.key(), item.value());
  for (const auto& [name, tensor] : state) {
    const TensorView* stored = file.find(name);
    if (stored == nullptr)
      throw ConfigError(path + ": a checkpoint of another model: it has no " + name);
    if (stored->shape != tensor.sizes().vec() || stored->dtype != dtype_of(tensor)) {
      throw ConfigError(path + ": a checkpoint of another model: " + name + " is " +
                        to_string(stored->dtype) + " " + shape_text(stored->shape) + ", expected " +
                        to_string(dtype_of(tensor)) + " " + shape_text(tensor.sizes().vec()));
    }
  }
  for (const TensorView& stored : file.tensors()) {
    const auto known = [&](const auto& item) { return item.first == stored.name; };
    if (std::none_of(state.begin(), state.end(), known)) {
      throw ConfigError(path + ": a checkpoint of another model: " + stored.name +
                        " is not in this one");
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : state) {
    const TensorView& stored = file.at(name);
    at::Tensor source = at::from_blob(const_cast<std::byte*>(stored.bytes.data()), tensor.sizes(),
                                      at::TensorOptions().dtype(tensor.dtype()));
    tensor.copy_(source);
  }
}

}  // namespace cohort::train
