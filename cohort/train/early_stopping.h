// SPDX-License-Identifier: Apache-2.0
// Decides when validation has stopped improving. Local: all ranks decide alike if they give it the
// same metric, such as MeanMetric::mean() returns.
#pragma once
#include <cstdint>
#include <optional>

namespace cohort::train {

enum class Better { kLower, kHigher };

struct EarlyStoppingOptions {
  /// Stop after this many calls of update() (validations) in a row without a new best; 0: never.
  int64_t patience = 0;
  Better better = Better::kLower;  ///< kLower for losses, kHigher for BLEU or accuracy.
  double min_delta = 0.0;          ///< A new best must be better by more than this, >= 0.
};

/// What a checkpoint keeps, so that a resumed run stops where the other would have.
struct EarlyStoppingState {
  std::optional<double> best{};
  int64_t num_without_best = 0;  ///< Calls of update() since the best value.
};

/// Watches one metric.
class EarlyStopping {
 public:
  /// Errors: ConfigError if patience or min_delta is negative.
  explicit EarlyStopping(const EarlyStoppingOptions& options, const EarlyStoppingState& state = {});

  /// Takes the metric's next value; returns whether it is the best so far. NaN never is.
  bool update(double value);
  bool should_stop() const;
  const EarlyStoppingState& state() const { return state_; }

 private:
  EarlyStoppingOptions options_;
  EarlyStoppingState state_;
};

}  // namespace cohort::train
