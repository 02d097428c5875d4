// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run: last/, best/ and checkpoints/<update>/ in its folder.
#pragma once
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/comm/process_group.h"
#include "cohort/train/checkpoint.h"
#include "cohort/train/sharded_checkpoint.h"
#include "cohort/translate/run_state.h"
#include "cohort/translate/training.h"

namespace cohort::translate {

enum class Start { kFresh, kResume };

/// Returns whether the run in the folder resumes. Local, for rank 0.
/// Errors: ConfigError if it holds a run that can be neither continued nor replaced.
Start find_start(const TrainingOptions& options);
/// The precision of the run that resumes there; "" if it does not tell. Local, for rank 0.
/// Errors: ConfigError if last/ is damaged.
std::string stored_precision(const std::string& model_dir);
/// Removes what an earlier run left there, but for its vocabularies and tokens.
void remove_earlier_run(const std::string& model_dir);

/// What is in best/.
struct BestScores {
  int64_t update = 0;
  std::optional<ValidScores> scores;  ///< Nothing if there is no best/.
};

/// Reads and writes a run's checkpoints.
///
/// What is saved is copied and written in the background, by the ranks that hold it: call every
/// `save_` on all ranks, with each one's shards. A save that fails is logged, the checkpoint before
/// it is still there, and training continues: a later save replaces it. The weights of best/ are kept
/// until they are written.
/// Threads: one.
class RunCheckpoints {
 public:
  /// `text_sha256` is the training text's, `valid_sha256` the validation text's (valid_sets_sha256).
  /// `options` and `log` must outlive this.
  RunCheckpoints(const TrainingOptions& options, std::string text_sha256, std::string valid_sha256,
                 const Log& log);

  /// Where the run in last/ stands. Rank 0 reads; the others need not see its folder.
  ///
  /// Should best/ not hold the state's best, for it could not be saved and the run was killed, the
  /// state's best is the one that is there.
  /// Collective; blocks. Errors, on all ranks: ConfigError if last/ or best/ is damaged, or last/
  /// of a run with other text, vocabularies, model or first metric: it names what differs.
  RunState read_last(const comm::ProcessGroup& group) const;
  /// What best/ holds. Rank 0 reads. Collective; blocks.
  /// Errors: as read_last.
  BestScores read_best(const comm::ProcessGroup& group) const;
  /// Whether last/ has the part: "average", say. Collective; blocks.
  /// Errors: as read_last.
  bool last_has(const std::string& part, const comm::ProcessGroup& group) const;
  /// Fills the shards of `parts` from last/, whichever ranks wrote it. Where every rank holds all,
  /// rank 0 reads and the others need not see its folder; where shards are `sharded`, every rank
  /// reads its own. Collective; blocks.
  /// Errors: as read_last.
  void load_last(const train::ShardedParts& parts, bool sharded,
                 const comm::ProcessGroup& group) const;

  /// Sets the ranks that write checkpoints, each its local shards: `writers` if this rank is one of
  /// them, empty if others write. Call it before the first save.
  void save_with(const comm::ProcessGroup& writers);
  bool saves() const { return writer_.has_value(); }
  /// Removes those in checkpoints/ that a run which resumes at `update` makes again: with other
  /// options they would be of another run. In the background.
  void remove_kept_after(int64_t update);

  // What follows is collective over the writers and does nothing elsewhere. `state` is the run's of
  // now.

  void save_last(const RunState& state, const train::ShardedParts& parts);
  /// `weights` are the best ones, of `state.best`.
  void save_best(const RunState& state, const std::vector<train::TensorShard>& weights);
  /// Keeps the weights of this update, smoothed if there is an average, in checkpoints/. Those that
  /// are too many by --keep-interval-updates go once they are there.
  void save_kept(const RunState& state, const train::ShardedParts& parts);

  /// Whether a save has begun that is no checkpoint yet: the same on all writers.
  bool pending() const { return writer_ && writer_->pending(); }
  /// Whether this rank still writes its shards. Local.
  bool writing() const { return pending() && !writer_->done(); }
  /// Blocks until this rank has written them. Local.
  void wait_written();
  /// Commits the save that has begun. Blocks until all writers have written.
  void finish_save();
  /// The same of a run's first save.
  /// Errors: c10::Error or ConfigError if it failed; other saves than the first and the last are
  ///         logged then, for there is an earlier one to resume from.
  void finish_first_save();
  /// The same of everything.
  /// Errors: c10::Error or ConfigError if the last save failed, or best/ could not be written once
  ///         more.
  void finish();

 private:
  struct Best {
    train::ShardedParts parts;
    int64_t update = 0;
    train::Metadata metadata;
  };

  const train::Metadata& data_metadata() const;
  train::Metadata model_metadata(int64_t update) const;
  void check_same_run(const train::Metadata& found) const;
  void take_best_that_is_there(RunState& state) const;
  void begin(const std::string& folder, const train::ShardedParts& parts, int64_t update,
             const train::Metadata& metadata);
  void write_best();
  void begin_best();
  std::exception_ptr commit();
  void prune();
  void remove_kept(const std::vector<int64_t>& updates);
  void prune_servers() const;

  const TrainingOptions& options_;
  const Log& log_;
  const std::string last_, best_;
  const std::string text_sha256_, valid_sha256_;
  // Of the text and the vocabularies that the run rests on.
  mutable std::optional<train::Metadata> data_metadata_;
  std::optional<Best> unwritten_best_;                    // until best/ is known to hold it
  std::optional<train::ShardedCheckpointWriter> writer_;  // on writers
  bool is_first_writer_ = false;
  std::string begun_;           // the folder of the save that is pending
  std::string servers_begun_;   // and RunState::servers of it
  std::string servers_newest_;  // RunState::servers of the last save that was asked for
};

}  // namespace cohort::translate
