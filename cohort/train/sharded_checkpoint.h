// SPDX-License-Identifier: Apache-2.0
// Checkpoints that all ranks write together, each its own shards, and read together.
#pragma once
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/stored_checkpoint.h"
#include "cohort/comm/process_group.h"
#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/train/background_task.h"
#include "cohort/train/checkpoint.h"
#include "cohort/train/snapshot.h"

namespace cohort::train {

/// The local shards of a sharded model, detached.
std::vector<TensorShard> shards_of(const std::vector<TensorShard>& parameters);

/// Saves in the background: every rank copies its shards and writes them, then a short collective
/// makes the files one checkpoint.
///
///   writer.begin(folder, shards, update, metadata);     // when all ranks decide to save
///   ... training continues ...
///   if (all_ranks(writer.done())) writer.commit();   // the manifest: now it is the checkpoint
///
/// The folder is one that all ranks see. Files of earlier saves in it are removed, those of other
/// programs stay. Every element must be in one rank's shards: of tensors that all ranks hold, each
/// rank gives its share_of; or one rank saves alone, in a group of its own: then the files are what
/// save_checkpoint writes. Killed at any moment, the folder holds the checkpoint before or the new
/// one (base/stored_checkpoint.h).
///
/// Memory: a copy of the rank's shards from begin() until they are written. Writing has a low
/// priority (BackgroundTask), so on a busy computer it may take a while.
/// Threads: one caller. The destructor waits for the writing of
/// this rank; what was not committed is lost, and the next commit there removes its files.
class ShardedCheckpointWriter {
 public:
  /// `visible_timeout`: how long rank 0 waits for a shared file system to show it the files that
  /// others have written.
  explicit ShardedCheckpointWriter(
      const comm::ProcessGroup& group,
      std::chrono::milliseconds visible_timeout = std::chrono::seconds(10))
      : group_(group), visible_timeout_(visible_timeout) {}

  /// Copies this rank's shards and writes them in the background. `folder`, `update` and the names
  /// of parts are the same on all ranks; `metadata` is rank 0's. Local; blocks for the copying.
  /// Errors: c10::ValueError if the save before is not committed.
  void begin(const std::string& folder, const ShardedParts& parts, int64_t update,
             const Metadata& metadata);
  /// The same without a copy: the caller does not change the tensors of `parts` before commit().
  /// Local. Blocks for the device's work so far and, as begin() does, while older files are removed
  /// or work of run_in_background() runs.
  void begin_without_copy(const std::string& folder, const ShardedParts& parts, int64_t update,
                          const Metadata& metadata);

  /// Of the save that has begun: what this rank will load of it, which another may write. A tensor
  /// that the save has in another shape, or in a type that no load converts, makes commit refuse
  /// it. `loaded` is called at once; what it throws, commit throws on every rank. Local.
  /// Errors: c10::ValueError before `begin`.
  void require_loadable(const std::function<ShardedParts()>& loaded);

  /// Whether a save has begun and is not committed.
  bool pending() const { return pending_; }
  /// Whether this rank has nothing to write or remove any more: commit waits for those that have.
  /// Local.
  bool done() const { return !task_.busy(); }
  /// Blocks until then. Local.
  void wait_written() { task_.wait_idle(); }

  /// Waits until every rank has written, then rank 0 checks that it sees all files and writes the
  /// manifest. The files of the checkpoint before it removes in the background. Collective; blocks.
  /// Cost:   two messages a rank, the first with some 100 bytes for each tensor.
  /// Errors: the same on every rank: ConfigError or c10::Error that names the rank which could not
  ///         write and why, the elements that are in no rank's shards or in two's, or the tensor
  ///         that a rank could not load (require_loadable);
  ///         c10::ValueError if a later save by another writer into the folder has begun. The
  ///         checkpoint before stays, what was written goes, and the next save may begin.
  void commit(CallSite site = CallSite::here());

  /// Runs `work` on the thread that writes, with its low priority, after what that does. It must
  /// not throw. Local; blocks while this rank writes.
  void run_in_background(std::function<void()> work) { task_.start(std::move(work)); }

 private:
  void check_idle() const;
  void start(const std::string& folder, const ShardedParts& parts, int64_t update,
             const Metadata& metadata);
  std::vector<std::string> commit_shares(const std::string& report);

  comm::ProcessGroup group_;
  std::chrono::milliseconds visible_timeout_;
  bool pending_ = false;
  int64_t number_ = 0;  // Among the saves of this process.
  std::string folder_;
  Metadata metadata_;
  std::optional<Manifest> share_;    // What this rank has written, once done.
  std::string wanted_;               // Manifest of what it loads, without files; empty: nothing.
  std::exception_ptr wanted_error_;  // Instead of that.
  Snapshot snapshot_;
  BackgroundTask task_{"checkpoint"};  // Last: it reads the snapshot and writes the share.
};

/// Fills every rank's shards from a checkpoint of any ranks. `parts` has the same parts on all
/// ranks. Collective; blocks.
/// Returns: what is missing on some rank, and what no rank asks for.
/// Errors: the same on every rank: ConfigError as load_checkpoint's, with the first rank that found
///         it, or if a save by others meanwhile gave ranks different ones; no rank's tensors have
///         changed then.
IncompatibleKeys load_shards(const std::string& path, const ShardedParts& parts,
                             const comm::ProcessGroup& group, const LoadOptions& options = {},
                             CallSite site = CallSite::here());
/// The same of shards that depend on the checkpoint.
IncompatibleKeys load_shards(const std::string& path, const MakeParts& parts,
                             const comm::ProcessGroup& group, const LoadOptions& options = {},
                             CallSite site = CallSite::here());

}  // namespace cohort::train
