// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/early_stopping.h"

#include <cmath>
#include <string>

#include "cohort/base/error.h"

namespace cohort::train {

EarlyStopping::EarlyStopping(const EarlyStoppingOptions& options, const EarlyStoppingState& state)
    : options_(options), state_(state) {
  if (options.patience < 0) {
    throw ConfigError("early stopping: expected patience >= 0, found " +
                      std::to_string(options.patience));
  }
  if (!(options.min_delta >= 0.0)) {
    throw ConfigError("early stopping: expected min_delta >= 0, found " +
                      std::to_string(options.min_delta));
  }
}

bool EarlyStopping::update(double value) {
  const double sign = options_.better == Better::kLower ? -1.0 : 1.0;
  const bool improved =
      !std::isnan(value) && (!state_.best || sign * (value - *state_.best) > options_.min_delta);
  if (improved) {
    state_.best = value;
    state_.num_without_best = 0;
  } else {
    ++state_.num_without_best;
  }
  return improved;
}

bool EarlyStopping::should_stop() const {
  return options_.patience > 0 && state_.num_without_best >= options_.patience;
}

}  // namespace cohort::train
