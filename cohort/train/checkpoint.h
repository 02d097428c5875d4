// SPDX-License-Identifier: Apache-2.0
// A training run on disk: tensors as safetensors under plain names, and a manifest written last.
//
// What one process writes whole is here, and reading of every checkpoint, into whole tensors or
// shards of them, whatever ranks wrote it. Several ranks write by sharded_checkpoint.h, which also
// writes in the background. The files are described in base/stored_checkpoint.h.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/train/tensor_shard.h"

namespace torch::nn {
class Module;
}

namespace cohort {
class StoredCheckpoint;
}

namespace cohort::train {

/// What a manifest says beside the tensors: flat names and values, "model.dim_emb" = "512".
using Metadata = std::map<std::string, std::string>;

/// A module's parameters, then its buffers; they share its memory.
NamedTensors state_of(const torch::nn::Module& model);

/// Writes every part as a file, then the manifest; then the files of older saves are removed. The
/// folder is made if need be. Files of other programs in it stay.
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

/// Returns a tensor's name in the model from its name in the checkpoint.
using Rename = std::function<std::string(const std::string&)>;
/// Replaces the first of these prefixes that a name begins with, {"model.", ""} say. Other names
/// stay.
Rename rename_prefixes(std::vector<std::pair<std::string, std::string>> prefixes);

/// How names and types of a checkpoint become those of a model. The same on all ranks.
struct LoadOptions {
  /// A tensor of the loaded parts that no rank asks for, or one that is asked for and not there, is
  /// an error that names the first few. false: the others are loaded, and the names returned.
  bool strict = true;
  Rename rename;  ///< Empty: names are the same.
  /// Elements of one floating-point type are converted into another, rounded to nearest. false:
  /// another type is an error.
  bool convert_dtype = false;
  /// Of a file of torch.save: where in it the state dict is, "state_dict" or "model", say. Empty:
  /// it is the whole file.
  std::string key;
};

/// As torch.nn.Module.load_state_dict returns it; the same on all ranks; empty if strict.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< Asked for, but not in the checkpoint.
  std::vector<std::string> unexpected;  ///< Only in the checkpoint: its names.
};

/// Fills the tensors of all `parts`. Tensors that are missing stay as they are. Local.
///
/// `path`: a checkpoint's folder; or what other programs wrote, which has the part "weights" alone:
/// a safetensors file; an index of several (`*.index.json`) as Hugging Face writes it; a folder
/// with model.safetensors.index.json or model.safetensors; a state dict of Python's torch.save or a
/// module of C++ torch::save, of which nothing is executed.
/// Errors: ConfigError that names file and tensor: damage, a checksum that differs, a tensor of
///         another shape or type, two that are renamed to one name, names that do not fit if
///         `strict`. Tensors are changed only if everything fits.
IncompatibleKeys load_checkpoint(const std::string& path, const Parts& parts,
                                 const LoadOptions& options = {});
/// The same of a model alone: the part "weights".
IncompatibleKeys load_checkpoint(const std::string& path, torch::nn::Module& model,
                                 const LoadOptions& options = {});

/// Fills shards, from those files alone that hold their elements. Local.
/// Memory: no copy of a tensor.
/// Errors: as load_checkpoint; but tensors that no shard is of are not missed: where ranks hold
///         shards each, sharded_checkpoint.h's load_shards sees to that.
void load_shards(const std::string& path, const ShardedParts& parts);

/// Shards that depend on what a checkpoint holds.
using MakeParts = std::function<ShardedParts(StoredCheckpoint&)>;

/// A load in two halves: all that can be wrong is found before a tensor changes. Local.
class CheckpointLoad {
 public:
  /// Opens and checks the files that hold elements of these shards. A save by others meanwhile may
  /// take files away: then the checkpoint that it left is read, and `parts` is called again.
  /// Errors: as load_checkpoint, but for `strict`: see check_strict.
  CheckpointLoad(const std::string& path, const MakeParts& parts, const LoadOptions& options);
  ~CheckpointLoad();
  CheckpointLoad(const CheckpointLoad&) = delete;
  CheckpointLoad& operator=(const CheckpointLoad&) = delete;

  using Keys = std::set<std::pair<std::string, std::string>>;  ///< The file, then the name.
  const Keys& missing() const;
  const Keys& unexpected() const;
  /// The same for loads of the same save.
  std::string identity() const;
  void fill() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The part's tensors by their names in the model; the values are their names in the checkpoint.
/// Errors: ConfigError if two have one name, or there is no such part.
std::map<std::string, std::string> renamed_tensors(StoredCheckpoint& checkpoint,
                                                   const std::string& part, const Rename& rename);
/// Errors: ConfigError that names the first few, if there are any.
void check_strict(const CheckpointLoad::Keys& missing, const CheckpointLoad::Keys& unexpected);
/// The names alone.
IncompatibleKeys incompatible_keys(const CheckpointLoad::Keys& missing,
                                   const CheckpointLoad::Keys& unexpected);

}  // namespace cohort::train
