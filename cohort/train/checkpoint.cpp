#include "cohort/train/checkpoint.h"

#include <set>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/stored_tensor.h"

namespace cohort::train {
namespace {

// A load beside a run that saves: each attempt but the first meets a later save than the one
// before.
constexpr int kMaxAttempts = 10;

[[noreturn]] void fail_other_model(const std::string& path, const std::string& what) {
  throw ConfigError(path + ": a checkpoint of another model: " + what);
}

// The file that holds the tensor, or the manifest if there are several: what errors speak of.
std::string place_of(const StoredCheckpoint& checkpoint, const StoredTensor& tensor) {
  const bool one = tensor.ranges.size() == 1;
  return checkpoint.folder() + "/" +
         (one ? checkpoint.manifest().files.at(tensor.ranges.begin()->first).name
              : "manifest.json");
}

// The file of a part that is one file, else the manifest.
std::string place_of(const StoredCheckpoint& checkpoint, const std::string& part) {
  const auto& files = checkpoint.manifest().files;
  const auto found = files.find(part);
  return checkpoint.folder() + "/" + (found == files.end() ? "manifest.json" : found->second.name);
}

// A shard, and where its elements lie in mapped files.
struct Filling {
  TensorShard shard;
  std::vector<std::span<const std::byte>> sources;

  void fill() const {
    const at::NoGradGuard no_grad;
    const at::Tensor target = shard.tensor.detach();
    const at::Tensor flat =
        target.is_contiguous() ? target.view(-1) : at::empty({target.numel()}, target.options());
    int64_t offset = 0;
    for (const auto bytes : sources) {
      const int64_t count = static_cast<int64_t>(bytes.size()) / target.element_size();
      flat.narrow(0, offset, count)
          .copy_(at::from_blob(const_cast<std::byte*>(bytes.data()), {count},
                               at::TensorOptions().dtype(target.dtype())));
      offset += count;
    }
    if (!target.is_contiguous()) target.copy_(flat.view(target.sizes()));
  }
};

Filling prepare(StoredCheckpoint& checkpoint, const std::string& part, const TensorShard& shard) {
  const auto& tensors = checkpoint.part(part);
  const auto found = tensors.find(shard.name);
  if (found == tensors.end())
    fail_other_model(place_of(checkpoint, part), "it has no " + shard.name);
  const StoredTensor& stored = found->second;
  const DType dtype = dtype_of(shard.tensor);
  if (stored.dtype != dtype || stored.shape != shard.shape) {
    fail_other_model(place_of(checkpoint, stored),
                     shard.name + " is " + to_string(stored.dtype) + " " + to_string(stored.shape) +
                         ", expected " + to_string(dtype) + " " + to_string(shard.shape));
  }
  check_shard(shard);
  return {shard, checkpoint.elements(part, shard.name, {shard.begin, shard.end})};
}

ShardedParts whole(const Parts& parts) {
  ShardedParts shards;
  for (const auto& [part, tensors] : parts) shards[part] = full_shards(tensors);
  return shards;
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

struct CheckpointLoad::Impl {
  explicit Impl(const std::string& folder) : checkpoint(folder) {}

  void prepare_all(const ShardedParts& parts) {
    for (const auto& [part, shards] : parts) {
      checkpoint.part(part);
      std::set<std::string> names;
      for (const TensorShard& shard : shards) {
        fillings.push_back(prepare(checkpoint, part, shard));
        names.insert(shard.name);
      }
      for (const auto& [name, stored] : checkpoint.part(part)) {
        if (!names.contains(name)) missed.emplace_back(place_of(checkpoint, stored), name);
      }
    }
  }

  StoredCheckpoint checkpoint;
  std::vector<Filling> fillings;
  std::vector<std::pair<std::string, std::string>> missed;
};

CheckpointLoad::CheckpointLoad(const std::string& folder, const ShardedParts& parts) {
  for (int attempt = 1; attempt <= kMaxAttempts; ++attempt) {
    impl_ = std::make_unique<Impl>(folder);
    try {
      impl_->prepare_all(parts);
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

std::vector<std::pair<std::string, std::string>> CheckpointLoad::missed() const {
  return impl_->missed;
}

void CheckpointLoad::fill() const {
  for (const Filling& filling : impl_->fillings) filling.fill();
}

void load_shards(const std::string& folder, const ShardedParts& parts) {
  CheckpointLoad(folder, parts).fill();
}

void load_checkpoint(const std::string& folder, const Parts& parts) {
  const CheckpointLoad load(folder, whole(parts));
  for (const auto& [place, name] : load.missed())
    fail_other_model(place, name + " is not in this one");
  load.fill();
}

void load_checkpoint(const std::string& folder, torch::nn::Module& model) {
  load_checkpoint(folder, Parts{{"weights", state_of(model)}});
}

}  // namespace cohort::train
