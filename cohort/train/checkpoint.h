// A training run on disk: tensors as safetensors under plain names, and a manifest written last.
//
// What one process writes whole is here, and reading of every checkpoint, into whole tensors or
// shards of them, whatever ranks wrote it. Several ranks write by sharded_checkpoint.h, which also
// writes in the background. The files are described in base/stored_checkpoint.h.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/train/tensor_shard.h"

namespace torch::nn {
class Module;
}

namespace cohort::train {

/// What a manifest says beside the tensors: flat names and values, "model.dim_emb" = "512".
using Metadata = std::map<std::string, std::string>;

/// A module's parameters, then its buffers; they share its memory.
NamedTensors state_of(const torch::nn::Module& model);

/// Writes every part as a file, then the manifest; then the files of older saves are removed, as is
/// every other safetensors file: the folder is the checkpoint's own, and made if need be.
///
/// Local: for rank 0. `update` numbers the files. Blocks until the disk has them.
/// Errors: ConfigError if the folder is not writable; c10::Error if writing fails: the previous
///         checkpoint stays, and what was written goes.
void save_checkpoint(const std::string& folder, const Parts& parts, int64_t update,
                     const Metadata& metadata);
/// The same of a model alone: the part "weights".
void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Metadata& metadata);

/// Returns the manifest's metadata, without reading tensors.
/// Errors: ConfigError that names the file if there is none, or it is no manifest.
Metadata read_manifest(const std::string& folder);
/// Returns the update that the checkpoint was saved after: the optimizer's step number, where that
/// was given.
/// Errors: as read_manifest, and if the manifest has none.
int64_t read_update(const std::string& folder);

/// Fills the tensors of all `parts`.
/// Errors: ConfigError that names file and tensor: damage, a checksum that differs, a tensor that
///         is missing, left over, or of another shape or type (a checkpoint of another model).
///         Tensors are changed only if everything fits.
void load_checkpoint(const std::string& folder, const Parts& parts);
/// The same of a model alone: the part "weights".
void load_checkpoint(const std::string& folder, torch::nn::Module& model);

/// Fills shards, from those files alone that hold their elements. Local.
/// Memory: no copy of a tensor.
/// Errors: as load_checkpoint; but tensors that no shard is of are not missed: where ranks hold
///         shards each, sharded_checkpoint.h's load_shards sees to that.
void load_shards(const std::string& folder, const ShardedParts& parts);

/// A load in two halves: all that can be wrong is found before a tensor changes. Local.
class CheckpointLoad {
 public:
  /// Opens and checks the files that hold elements of these shards. A save by others meanwhile may
  /// take files away: then the checkpoint that it left is the one.
  /// Errors: as load_shards.
  CheckpointLoad(const std::string& folder, const ShardedParts& parts);
  ~CheckpointLoad();
  CheckpointLoad(const CheckpointLoad&) = delete;
  CheckpointLoad& operator=(const CheckpointLoad&) = delete;

  /// The checkpoint's tensors that no shard is of, in the parts that were asked for: where they
  /// lie, then their name.
  std::vector<std::pair<std::string, std::string>> missed() const;
  /// The same for loads of the same save.
  std::string identity() const;
  void fill() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::train
