// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/base/tensor_file.h"
#include "cohort/train/stored_tensor.h"

namespace cohort::train {
namespace {

// A load beside a run that saves: each attempt but the first meets a later save than the one
// before.
constexpr int kMaxAttempts = 10;

[[noreturn]] void fail_other_model(const std::string& path, const std::string& what) {
  throw ConfigError(path + ": a checkpoint of another model: " + what);
}

// The file of this key, or the manifest if it is not one file: what errors speak of.
std::string place_of(const StoredCheckpoint& checkpoint, const std::string& key) {
  const auto& files = checkpoint.manifest().files;
  const auto found = files.find(key);
  if (found == files.end()) return checkpoint.path();
  return checkpoint.folder() + "/" + found->second.name;
}

std::string place_of(const StoredCheckpoint& checkpoint, const StoredTensor& tensor) {
  return tensor.ranges.size() == 1 ? place_of(checkpoint, tensor.ranges.begin()->first)
                                   : checkpoint.path();
}

// A shard, and where its elements lie in mapped files.
struct Filling {
  TensorShard shard;
  at::ScalarType stored_type;
  std::vector<std::span<const std::byte>> sources;

  void fill() const {
    const at::NoGradGuard no_grad;
    const at::Tensor target = shard.tensor.detach();
    const at::Tensor flat =
        target.is_contiguous() ? target.view(-1) : at::empty({target.numel()}, target.options());
    const auto item = static_cast<int64_t>(c10::elementSize(stored_type));
    int64_t offset = 0;
    for (const auto bytes : sources) {
      const int64_t count = static_cast<int64_t>(bytes.size()) / item;
      flat.narrow(0, offset, count).copy_(tensor_of(bytes, count));
      offset += count;
    }
    if (!target.is_contiguous()) target.copy_(flat.view(target.sizes()));
  }

 private:
  // Files of others may hold elements at any offset.
  at::Tensor tensor_of(std::span<const std::byte> bytes, int64_t count) const {
    const auto type = at::TensorOptions().dtype(stored_type);
    if (reinterpret_cast<uintptr_t>(bytes.data()) % c10::elementSize(stored_type) == 0)
      return at::from_blob(const_cast<std::byte*>(bytes.data()), {count}, type);
    at::Tensor copy = at::empty({count}, type);
    std::memcpy(copy.data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
};

Filling prepare(StoredCheckpoint& checkpoint, const std::string& part, const std::string& name,
                const TensorShard& shard, bool convert) {
  const StoredTensor& stored = checkpoint.part(part).at(name);
  const DType dtype = dtype_of(shard.tensor);
  const bool fits =
      stored.dtype == dtype || (convert && is_floating(stored.dtype) && is_floating(dtype));
  if (!fits || stored.shape != shard.shape) {
    fail_other_model(place_of(checkpoint, stored),
                     shard.name + " is " + to_string(stored.dtype) + " " + to_string(stored.shape) +
                         ", expected " + to_string(dtype) + " " + to_string(shard.shape));
  }
  check_shard(shard);
  return {shard, scalar_type(stored.dtype),
          checkpoint.elements(part, name, {shard.begin, shard.end})};
}

ShardedParts whole(const Parts& parts) {
  ShardedParts shards;
  for (const auto& [part, tensors] : parts) shards[part] = full_shards(tensors);
  return shards;
}

MakeParts always(const ShardedParts& parts) {
  return [&parts](StoredCheckpoint&) { return parts; };
}

std::vector<std::string> names_of(const CheckpointLoad::Keys& keys) {
  std::vector<std::string> names;
  for (const auto& [place, name] : keys) names.push_back(name);
  std::ranges::sort(names);
  return names;
}

// "a, b, c and 4 more"
std::string first_few(const CheckpointLoad::Keys& keys) {
  constexpr size_t kNamed = 3;
  std::string text;
  size_t count = 0;
  for (const std::string& name : names_of(keys)) {
    if (count++ == kNamed) return text + " and " + std::to_string(keys.size() - kNamed) + " more";
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

// Of shards that are everything.
void save_whole(const std::string& folder, const ShardedParts& parts, int64_t update,
                const Metadata& metadata) {
  Manifest manifest = write_parts(folder, parts, {.update = update});
  manifest.metadata = metadata;
  try {
    commit_manifest(folder, manifest);
  } catch (...) {
    discard_share(folder, manifest);
    throw;
  }
}

}  // namespace

NamedTensors state_of(const torch::nn::Module& model) {
  NamedTensors state;
  for (const auto& item : model.named_parameters())
    state.emplace_back(item.key(), item.value().detach());
  for (const auto& item : model.named_buffers())
    state.emplace_back(item.key(), item.value().detach());
  return state;
}

void save_checkpoint(const std::string& folder, const Parts& parts, int64_t update,
                     const Metadata& metadata) {
  save_whole(folder, whole(parts), update, metadata);
}

void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Metadata& metadata) {
  save_checkpoint(folder, Parts{{"weights", state_of(model)}}, update, metadata);
}

Metadata read_manifest(const std::string& folder) {
  return Manifest::read(folder).metadata;
}

int64_t read_update(const std::string& folder) {
  const auto update = Manifest::read(folder).update;
  if (!update) throw ConfigError(folder + ": expected a checkpoint with an update in its manifest");
  return *update;
}

Rename rename_prefixes(std::vector<std::pair<std::string, std::string>> prefixes) {
  return [prefixes = std::move(prefixes)](const std::string& name) {
    for (const auto& [before, after] : prefixes)
      if (name.starts_with(before)) return after + name.substr(before.size());
    return name;
  };
}

std::map<std::string, std::string> renamed_tensors(StoredCheckpoint& checkpoint,
                                                   const std::string& part, const Rename& rename) {
  std::map<std::string, std::string> names;
  for (const auto& [stored, tensor] : checkpoint.part(part)) {
    const auto [found, is_new] = names.emplace(rename ? rename(stored) : stored, stored);
    if (!is_new) {
      throw ConfigError(place_of(checkpoint, part) + ": " + found->second + " and " + stored +
                        " are both renamed to " + found->first);
    }
  }
  return names;
}

void check_strict(const CheckpointLoad::Keys& missing, const CheckpointLoad::Keys& unexpected) {
  std::string text;
  if (!missing.empty()) text = "it has no " + first_few(missing);
  if (!unexpected.empty())
    text += (text.empty() ? "" : "; ") + ("the model has no " + first_few(unexpected));
  if (text.empty()) return;
  fail_other_model((missing.empty() ? unexpected : missing).begin()->first, text);
}

IncompatibleKeys incompatible_keys(const CheckpointLoad::Keys& missing,
                                   const CheckpointLoad::Keys& unexpected) {
  return {names_of(missing), names_of(unexpected)};
}

struct CheckpointLoad::Impl {
  Impl(const std::string& path, const std::string& key) : checkpoint(path, key) {}

  void prepare_all(const ShardedParts& parts, const LoadOptions& options) {
    const auto there = checkpoint.parts();
    for (const auto& [part, shards] : parts) {
      std::map<std::string, std::string> names;
      if (options.strict || std::ranges::count(there, part) > 0)
        names = renamed_tensors(checkpoint, part, options.rename);
      std::set<std::string> used;
      for (const TensorShard& shard : shards) {
        const auto found = names.find(shard.name);
        if (found == names.end()) {
          if (num_elements(shard.shape) == 0) continue;  // Ranks that hold shards do not save it.
          missing.emplace(place_of(checkpoint, part), shard.name);
          continue;
        }
        fillings.push_back(prepare(checkpoint, part, found->second, shard, options.convert_dtype));
        used.insert(shard.name);
      }
      for (const auto& [name, stored] : names) {
        const auto& tensor = checkpoint.part(part).at(stored);
        if (!used.contains(name) && num_elements(tensor.shape) != 0)
          unexpected.emplace(place_of(checkpoint, tensor), stored);
      }
    }
  }

  StoredCheckpoint checkpoint;
  std::vector<Filling> fillings;
  Keys missing;
  Keys unexpected;
};

CheckpointLoad::CheckpointLoad(const std::string& path, const MakeParts& parts,
                               const LoadOptions& options) {
  for (int attempt = 1; attempt <= kMaxAttempts; ++attempt) {
    impl_ = std::make_unique<Impl>(path, options.key);
    try {
      impl_->prepare_all(parts(impl_->checkpoint), options);
      return;
    } catch (const ConfigError&) {
      if (attempt == kMaxAttempts || !impl_->checkpoint.is_replaced()) throw;
    }
  }
}

CheckpointLoad::~CheckpointLoad() = default;

std::string CheckpointLoad::identity() const {
  Sha256 sum;
  sum.update(impl_->checkpoint.manifest().to_json());
  return sum.hex();
}

const CheckpointLoad::Keys& CheckpointLoad::missing() const {
  return impl_->missing;
}

const CheckpointLoad::Keys& CheckpointLoad::unexpected() const {
  return impl_->unexpected;
}

void CheckpointLoad::fill() const {
  for (const Filling& filling : impl_->fillings) filling.fill();
}

void load_shards(const std::string& path, const ShardedParts& parts) {
  const CheckpointLoad load(path, always(parts), {});
  check_strict(load.missing(), {});
  load.fill();
}

IncompatibleKeys load_checkpoint(const std::string& path, const Parts& parts,
                                 const LoadOptions& options) {
  const ShardedParts shards = whole(parts);
  const CheckpointLoad load(path, always(shards), options);
  if (options.strict) check_strict(load.missing(), load.unexpected());
  load.fill();
  return incompatible_keys(load.missing(), load.unexpected());
}

IncompatibleKeys load_checkpoint(const std::string& path, torch::nn::Module& model,
                                 const LoadOptions& options) {
  return load_checkpoint(path, Parts{{"weights", state_of(model)}}, options);
}

}  // namespace cohort::train
