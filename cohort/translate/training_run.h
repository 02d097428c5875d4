// SPDX-License-Identifier: Apache-2.0
// One run on one rank, for the files that train() is made of: training_start.cpp sets it up,
// training_step.cpp makes an update, training.cpp is the loop around it.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/free_memory.h"
#include "cohort/base/log.h"
#include "cohort/base/stop_request.h"
#include "cohort/data/token_batches.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/progress.h"
#include "cohort/translate/async_sum.h"
#include "cohort/translate/gpu_watch.h"
#include "cohort/translate/run_checkpoints.h"
#include "cohort/translate/run_data.h"
#include "cohort/translate/run_record.h"
#include "cohort/translate/run_state.h"
#include "cohort/translate/step_votes.h"
#include "cohort/translate/training.h"
#include "cohort/translate/updater.h"

namespace cohort::translate {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Moving and removing files.
inline constexpr std::chrono::minutes kFolderLimit{10};

class TrainingRun {
 public:
  // `keeps_precision`: that of `options` is of the run that resumes, for none was named. Collective.
  TrainingRun(const TrainingOptions& options, Start start, RunData data,
              const parallel::DeviceMesh& mesh, bool keeps_precision);
  TrainingResult loop();

 private:
  struct Update {
    std::vector<nmt::Batch> batches;
    std::vector<int64_t> sentences;  // of all batches, by number in data_.train
    int64_t num_tokens = 0;          // target tokens of all ranks' batches
  };

  // Start.
  Log make_log() const;
  void make_model();
  void fit_batch_sizes();
  std::optional<ps::SessionOptions> servers_to_begin_with(Start start) const;
  void prepare_folder(Start start);
  void load_last();
  void open_record();
  void report_start() const;

  // Step.
  void update(const Update& update, int64_t step, int64_t num_steps);
  StepVotes own_votes();
  void take_votes(const StepVotes& all);
  void exchange_votes(const Update& update, const UpdateReport& own);
  void exchange_in_background(const Update& update, const UpdateReport& own);
  bool is_sync_point() const;
  void synchronize(bool is_planned);
  void conclude(bool at_one_update);
  void report_trained(const UpdateReport& own, int64_t step, int64_t num_steps, double seconds);
  void report_skipped(const Update& update, const BadNumber& bad, double loss);

  // Loop.
  void run();
  bool train_epoch();  // whether it came to the end
  data::BatchOptions batch_options() const;
  void validate();
  Evaluation evaluate_valid_text();
  void report_validation(const ValidScores& scores, double train_loss, double tokens_per_s) const;
  void report_gpus(const std::vector<std::string>& gpu_use) const;
  void release_grown_memory();
  bool is_valid_update() const;
  bool is_save_due() const;
  bool is_time_up() const;
  void check_goals();
  void decide_to_stop(const std::string& reason) {
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  void save();
  bool save_servers();
  void check_servers_saved();
  void wait_for_save();
  void take_best_scores();
  void save_if_due();
  RunState state_now() const;
  TrainingResult result() const;
  double seconds() const { return state_.seconds + seconds_since(start_); }

  const TrainingOptions& options_;
  comm::ProcessGroup group_;
  comm::ProcessGroup data_group_;    // each rank has batches of its own
  comm::ProcessGroup tensor_group_;  // of the ranks that compute one model; empty: it is whole
  Log log_;
  RunData data_;
  nmt::Transformer model_{nullptr};
  std::optional<Updater> updater_;
  train::EarlyStopping early_stopping_;
  std::optional<RunRecord> record_;  // rank 0
  GpuWatch gpu_watch_{group_.rank_info().local_rank == 0 ? GpuWatch::Role::kSamples
                                                         : GpuWatch::Role::kRests};
  train::Progress progress_;
  Profiler profiler_;

  RunCheckpoints checkpoints_;
  StopRequest stop_request_;

  RunState state_;
  Clock::time_point start_;  // of this process's training, after tokenisation and set-up
  Clock::time_point saved_;
  bool save_is_due_ = false;           // the same on all writers
  std::exception_ptr servers_failed_;  // what their last save threw
  MemoryGrowth memory_growth_;

  StepVotes own_;        // losses, tokens and speed that this rank has not sent yet
  double loss_sum_ = 0;  // of the last update
  std::vector<double> rank_speeds_, rank_losses_;
  bool time_is_up_ = false;
  bool is_asked_ = false;
  std::optional<AsyncSum> async_sum_;  // ps-async: how votes travel

  std::string stop_reason_;
  bool was_asked_to_stop_ = false;
};

}  // namespace cohort::translate
