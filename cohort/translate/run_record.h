// What rank 0 writes about a run for those who watch it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/text/parallel_text.h"
#include "cohort/train/history.h"
#include "cohort/translate/training.h"

namespace cohort::translate {

/// One validation.
struct Validation {
  int64_t epoch = 0;  ///< Counted from 1.
  int64_t update = 0;
  double seconds = 0;     ///< Of training and validation, all starts together.
  double train_loss = 0;  ///< Since the last validation; NaN if nothing was trained.
  ValidScores scores;
  bool best = false;  ///< The best so far.
  double learning_rate = 0;
  double tgt_tokens_per_s = 0;  ///< In training, since the last validation.
  double own_seconds = 0;       ///< What this validation took.
};

/// Writes config.json, history.jsonl and result-dev.txt of a run's folder. For rank 0.
class RunRecord {
 public:
  /// Writes config.json and opens the history, which goes on after `last_update`. `options` and
  /// `valid_text` must outlive this.
  RunRecord(const TrainingOptions& options, int world_size, const text::ParallelText& valid_text,
            int64_t last_update);

  /// `translations` are those of the validation text, or none.
  void validated(const Validation& validation, const std::vector<std::string>& translations);

 private:
  const TrainingOptions& options_;
  const text::ParallelText& valid_text_;
  train::History history_;
};

}  // namespace cohort::translate
