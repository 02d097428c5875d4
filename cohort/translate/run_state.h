// SPDX-License-Identifier: Apache-2.0
// Where a training run stands, as its checkpoint says it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/data/token_batches.h"
#include "cohort/train/checkpoint.h"
#include "cohort/train/early_stopping.h"
#include "cohort/translate/valid_metric.h"

namespace cohort::translate {

/// What a run needs to resume as if it had not been stopped, beside its tensors. Parameters,
/// order of the data and dropout are functions of the seed and of these numbers, so no random
/// generator's state is among them.
struct RunState {
  int64_t epoch = 0;                     ///< Whole epochs trained.
  std::vector<data::EpochPart> trained;  ///< Of the epoch after those.
  int64_t updates = 0;
  int64_t skipped_in_a_row = 0;  ///< Updates that were none, for a number was not finite.

  double loss_sum = 0;  ///< Since the last validation, over all ranks.
  int64_t token_sum = 0;
  double train_seconds = 0;  ///< Likewise.

  double seconds = 0;  ///< Of training and validation, all starts together.
  train::EarlyStoppingState early_stopping;
  std::optional<ValidScores> best;  ///< Of the validation whose weights are in best/.
  int64_t best_update = 0;          ///< When that was.

  /// With parameter servers: the folder of their checkpoint of now, absolute; empty: none.
  std::string servers;

  std::vector<int64_t> fit_rows;  ///< Of --mini-batch-fit's trial, which is not made twice ...
  std::string fitted_for;         ///< ... for the same memory, ranks and ways to compute.

  /// Whether the weights of now have been validated.
  bool is_validated() const {
    return token_sum == 0 &&
           (updates > 0 || early_stopping.best || early_stopping.num_without_best > 0);
  }
};

/// Adds the scores that there are to `metadata`, as <prefix>loss, <prefix>bleu and <prefix>chrf,
/// exact to the last bit.
void write_scores(const ValidScores& scores, const std::string& prefix, train::Metadata& metadata);
/// Nothing if there is no <prefix>loss.
/// Errors: ConfigError for what is no number.
std::optional<ValidScores> read_scores(const std::string& prefix, const train::Metadata& metadata);

/// Adds the state to `metadata`, exact to the last bit.
void write_metadata(const RunState& state, train::Metadata& metadata);
/// Errors: ConfigError that names the metadata entry that is missing or has another form.
RunState read_state(const train::Metadata& metadata);

}  // namespace cohort::translate
