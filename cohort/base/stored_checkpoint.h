// SPDX-License-Identifier: Apache-2.0
// Checkpoints on disk, as files and bytes: writing a rank's share, making the shares one
// checkpoint, reading elements of whatever shares there are. Knows nothing of torch or ranks.
//
// Folder:  manifest.json (manifest.h), written last, and the safetensors files that it names:
//          weights-<update>.safetensors holds a whole part, and
//          weights-<update>.<rank>-of-<world size>.<digits of its SHA-256>.safetensors a share.
// A file that the manifest names is never written to. So whenever a save is killed, the folder
// holds the checkpoint before or the new one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/manifest.h"
#include "cohort/base/safetensors.h"

namespace cohort {

/// Elements [begin, end) of a tensor, to be written.
struct StoredShard {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  ///< The whole tensor's.
  ElementRange range;
  std::span<const std::byte> bytes;  ///< Of these elements.
};

/// Which share of a checkpoint a file is. One rank alone writes plain whole parts.
struct ShareInfo {
  int64_t update = 0;
  int rank = 0;
  int world_size = 1;
};

/// Writes a rank's shards of `part` as one file into `folder`, which is made if need be, and syncs
/// it. Several shards may be of one tensor. Without elements to write, one of several ranks writes
/// no file, a rank alone an empty one. The checkpoint in the folder stays.
///
/// Returns: what the manifest must say of it.
/// Errors:  ConfigError: shards overlap, do not fit their bytes or shapes, `part` is empty or has a
///          slash, or the folder is not writable. c10::Error if writing fails.
Manifest write_share(const std::string& folder, const std::string& part,
                     const std::vector<StoredShard>& shards, const ShareInfo& info);

/// Makes the files that `manifest` names the folder's checkpoint, in one step; then removes the
/// safetensors files of earlier saves, those that the manifest before names or that are called
/// "<part>-<number>...", and temporary files of killed ones. Other files stay.
/// Errors: ConfigError if it is not whole, or its metadata is not UTF-8; c10::Error if writing
///         fails: the checkpoint before stays.
void commit_manifest(const std::string& folder, const Manifest& manifest);
/// The same, but the files of the checkpoint that was there before stay: removing gigabytes takes
/// time. Returns their paths, for the caller to remove.
[[nodiscard]] std::vector<std::string> commit_manifest_keeping(const std::string& folder,
                                                               const Manifest& manifest);

/// Removes the files of a share that was not committed, but none that the folder's checkpoint has.
/// Without that, saves that fail would fill a disk. Never throws: what cannot be removed stays.
void discard_share(const std::string& folder, const Manifest& share);

/// A checkpoint opened for reading: one of this project's, or of other programs what
/// train::load_checkpoint lists (train/checkpoint.h).
///
/// Of the former a file is mapped into memory, and checked whole against the manifest, when its
/// first element is asked for. Those of other programs have no checksums: files are mapped and
/// their headers checked by the constructor, elements are read when they are asked for.
///
/// Owner:   of the mappings; spans die with it.
/// Threads: one.
/// Errors:  ConfigError that names the file: missing, of another size, another SHA-256, of another
///          save, or with other tensors than the manifest says.
class StoredCheckpoint {
 public:
  /// `path`: a folder, or a file of another program. `key`: as TorchFile's.
  /// Errors: as Manifest::read and open_imported; ConfigError for a `key` of a folder with a
  ///         manifest.
  explicit StoredCheckpoint(const std::string& path, const std::string& key = {});

  const Manifest& manifest() const { return manifest_; }
  /// Of the manifest, or of the index or only file of another program.
  const std::string& path() const { return path_; }
  bool is_imported() const { return is_imported_; }  ///< Whether another program wrote it.
  const std::string& folder() const { return folder_; }
  /// Whether a later save has taken its place: files that are not open may be gone.
  bool is_replaced() const;
  std::vector<std::string> parts() const;
  /// The part's tensors. Version 1 opens its file for that.
  /// Errors: ConfigError if there is none.
  const std::map<std::string, StoredTensor>& part(const std::string& name);
  /// Where elements [begin, end) of a tensor that exists lie, in order.
  std::vector<std::span<const std::byte>> elements(const std::string& part,
                                                   const std::string& tensor, ElementRange range);
  /// Opens and checks a file by its key in the manifest.
  const TensorFile& file(const std::string& key);

 private:
  void check_tensors(const std::string& key, const SafetensorsFile& file) const;
  std::string path_of(const std::string& key) const;

  std::string folder_;
  std::string path_;
  bool is_imported_ = false;
  Manifest manifest_;
  std::map<std::string, std::unique_ptr<const TensorFile>> files_;
};

/// What becomes of a checkpoint in the folder where one is to be written.
enum class CheckpointThere { kStays, kIsReplaced };

/// Writes `parts` of a checkpoint into another folder as one rank would: a plain file for each,
/// with whole tensors. Update and metadata go along.
/// Cost:   memory for no more than the disk's cache.
/// Errors: as StoredCheckpoint, write_share and commit_manifest; ConfigError if `folder` is the
///         checkpoint's own, holds other things than a checkpoint, or a checkpoint that stays: it
///         says what would be lost.
void consolidate_checkpoint(StoredCheckpoint& checkpoint, const std::vector<std::string>& parts,
                            const std::string& folder,
                            CheckpointThere there = CheckpointThere::kStays);
/// The same of all parts in the checkpoint's own folder, in place of its shares, in one step. Does
/// nothing if every part is one plain file.
void make_checkpoint_whole(const std::string& folder);

}  // namespace cohort
