// SPDX-License-Identifier: Apache-2.0
// What rank 0 writes about a run: figures, curves and a report.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/gpu_monitor.h"
#include "cohort/base/log.h"
#include "cohort/text/parallel_text.h"
#include "cohort/train/event_file.h"
#include "cohort/train/history.h"
#include "cohort/translate/token_cache.h"
#include "cohort/translate/training.h"

namespace cohort::translate {

/// Returns a description of this rank's machine and threads, for RunStart::machines.
std::string describe_machine();

/// What a start of a run is told with.
struct RunStart {
  int64_t update = 0;         ///< Where the run resumes; 0 for a new one.
  bool is_validated = false;  ///< ... with the weights of then already validated.
  int64_t num_parameters = 0;
  int64_t train_pairs = 0;
  PairCounts pairs;                   ///< What became of the training text.
  std::vector<std::string> machines;  ///< By rank, from describe_machine.
};

/// One update, as rank 0 knows it.
struct TrainedUpdate {
  int64_t epoch = 0;  ///< Counted from 1.
  int64_t update = 0;
  double run_seconds = 0;  ///< Of training and validation, all starts together.
  bool skipped = false;    ///< There was no update, for a number was not finite.
  double loss_sum = 0;     ///< Over all target tokens of all ranks; with ps-async of rank 0's.
  int64_t tokens = 0;
  double gradient_norm = 0;
  double learning_rate = 0;
  double own_seconds = 0;  ///< What this update took.
  std::vector<double> rank_tokens_per_s;
};

/// One validation.
struct Validation {
  int64_t epoch = 0;  ///< Counted from 1.
  int64_t update = 0;
  double seconds = 0;     ///< Of training and validation, all starts together.
  double train_loss = 0;  ///< Since the last validation; NaN if nothing was trained.
  ValidScores scores;
  bool best = false;  ///< The best so far.
  double learning_rate = 0;
  double tgt_tokens_per_s = 0;       ///< In training, since the last validation.
  double own_seconds = 0;            ///< What this validation took.
  std::vector<std::string> gpu_use;  ///< By rank, from GpuWatch; may be empty.
};

/// Writes config.json, history.jsonl, tensorboard/, result-dev.txt and report.html of a run's
/// folder. For rank 0. docs/run-record.md describes the files.
///
/// What cannot be written when the run starts is an error: another folder is needed. A later
/// failure is logged, once for each file until it can be written again, and training continues.
/// Threads: one.
class RunRecord {
 public:
  /// Writes config.json, and opens the history and a new file of events, which continue after
  /// `start.update`: what the run will do again is cut off. `options`, `valid_text` and `log` must
  /// outlive this.
  /// Errors: ConfigError, or c10::Error if the disk is full.
  RunRecord(const TrainingOptions& options, const RunStart& start,
            const text::ParallelText& valid_text, const Log& log);

  /// Cheap, but for the update after which options.disp_freq_... asks for a line.
  void trained(const TrainedUpdate& update);
  /// Adds what was trained without an update of rank 0, of ps-async's other trainers: it counts for
  /// loss and speed of the next line about training.
  void trained_elsewhere(double loss_sum, int64_t tokens, double seconds);
  /// `translations` are those of the validation text, or none.
  void validated(const Validation& validation, const std::vector<std::string>& translations);
  /// Also of a run that an error ends: that is the reason then.
  void ended(const TrainingResult& result, double run_seconds);

 private:
  using Clock = std::chrono::steady_clock;

  // Sums and means since the last line about training.
  struct Window {
    int64_t num_updates = 0;
    int64_t num_skipped = 0;
    double loss_sum = 0;
    int64_t tokens = 0;
    double gradient_norm = 0;
    double seconds = 0;
    std::vector<double> rank_tokens_per_s;
    TrainedUpdate last;
  };

  void attempt(const std::string& file, const std::function<void()>& write);
  void write_start(const RunStart& start);
  void add_gpu_use(const std::vector<std::string>& gpu_use,
                   std::vector<train::History::Field>& line) const;
  void write_train_line();
  void refresh_report();
  std::vector<std::string> samples_of(const std::vector<std::string>& lines) const;

  const TrainingOptions& options_;
  const text::ParallelText& valid_text_;
  const Log& log_;
  train::History history_;
  train::EventFile events_;
  GpuMonitor gpus_;
  std::vector<std::pair<size_t, size_t>> gpus_of_hosts_;  // Each host's first rank, and its GPUs.
  Window window_;
  Clock::time_point line_time_ = Clock::now();    // Of the last line about training.
  std::optional<Clock::time_point> report_time_;  // Of the last report.
  std::set<std::string> failing_;                 // Files that could not be written last time.
};

}  // namespace cohort::translate
