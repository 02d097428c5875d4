// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/imported_checkpoint.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/json_keys.h"
#include "cohort/base/safetensors.h"
#include "cohort/base/torch_file.h"
#include "cohort/base/zip_archive.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kPart = "weights";

bool is_torch_file(const std::string& path) {
  std::array<char, 4> start{};
  std::ifstream(path, std::ios::binary).read(start.data(), start.size());
  return is_zip_archive(std::as_bytes(std::span(start)));
}

void add_tensor(ImportedCheckpoint& checkpoint, const std::string& key, const TensorView& tensor) {
  StoredTensor& stored = checkpoint.manifest.parts[kPart][tensor.name];
  stored = {tensor.dtype, tensor.shape, {}};
  auto& ranges = stored.ranges[key];
  const int64_t count = num_elements(tensor.shape).value();
  if (count > 0) ranges.push_back({0, count});
}

void add_file(ImportedCheckpoint& checkpoint, const std::string& key, const std::string& path,
              std::unique_ptr<const TensorFile> file) {
  checkpoint.manifest.files[key] = {fs::path(path).filename().string(), "", fs::file_size(path)};
  checkpoint.files[key] = std::move(file);
}

ImportedCheckpoint open_index(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ConfigError(path + ": expected a readable index");
  ImportedCheckpoint checkpoint{.path = path, .manifest = {}, .files = {}};
  for (const auto& [tensor, name] :
       parse_weight_map({std::istreambuf_iterator<char>(file), {}}, path)) {
    if (!checkpoint.files.contains(name)) {
      const std::string shard = (fs::path(path).parent_path() / name).string();
      std::error_code ignored;
      if (!fs::exists(shard, ignored))
        throw ConfigError(shard + ": is missing, but " + path + " names it");
      add_file(checkpoint, name, shard, std::make_unique<SafetensorsFile>(shard));
    }
    const TensorView* view = checkpoint.files.at(name)->find(tensor);
    if (view == nullptr)
      throw ConfigError(path + ": tensor " + tensor + " is not in " + name + ", as it says");
    add_tensor(checkpoint, name, *view);
  }
  return checkpoint;
}

ImportedCheckpoint open_file(const std::string& path, const std::string& key) {
  ImportedCheckpoint checkpoint{.path = path, .manifest = {}, .files = {}};
  std::unique_ptr<const TensorFile> file;
  if (is_torch_file(path)) {
    file = std::make_unique<TorchFile>(path, key);
  } else {
    file = std::make_unique<SafetensorsFile>(path);
  }
  for (const TensorView& tensor : file->tensors()) add_tensor(checkpoint, kPart, tensor);
  add_file(checkpoint, kPart, path, std::move(file));
  return checkpoint;
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(const std::string& text,
                                                    const std::string& where) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(where + ": not a valid index of safetensors files: " + what);
  };
  Json json;
  try {
    json = Json::parse(text, UniqueKeys(fail));
  } catch (const Json::exception& error) {
    fail(std::string("it is not JSON: ") + error.what());
  }
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    fail("expected an object with weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, name] : json["weight_map"].items()) {
    if (!name.is_string()) fail("tensor " + tensor + ": expected the name of its file");
    const auto& file = name.get_ref<const std::string&>();
    if (fs::path(file).filename() != file || file.empty() || file == "." || file == ".." ||
        file.find('\0') != file.npos)
      fail("tensor " + tensor + ": expected the name of a file beside the index, found " + file);
    files.emplace(tensor, file);
  }
  if (files.empty()) fail("expected tensors in weight_map");
  return files;
}

std::optional<ImportedCheckpoint> open_imported(const std::string& path, const std::string& key) {
  std::error_code ignored;
  std::string file = path;
  if (fs::is_directory(path, ignored)) {
    file = path + "/model.safetensors.index.json";
    if (!fs::exists(file, ignored)) file = path + "/model.safetensors";
    if (!fs::exists(file, ignored)) return std::nullopt;
  }
  if (!key.empty() && !is_torch_file(file))
    throw ConfigError(file + ": expected a file of torch.save, for a key was given: " + key);
  return file.ends_with(".index.json") ? open_index(file) : open_file(file, key);
}

}  // namespace cohort
