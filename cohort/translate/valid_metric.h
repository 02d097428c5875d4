// SPDX-License-Identifier: Apache-2.0
// The numbers by which a run is judged while it trains.
#pragma once
#include <optional>
#include <string>

#include "cohort/train/early_stopping.h"

namespace cohort::translate {

/// One validation's numbers; those of translations only if something was translated.
struct ValidScores {
  double loss = 0;               ///< Mean of -log p over target tokens.
  std::optional<double> bleu{};  ///< 0 to 100.
  std::optional<double> chrf{};  ///< chrF2, 0 to 100.

  bool operator==(const ValidScores&) const = default;
};

enum class ValidMetric { kLoss, kBleu, kChrf };

/// Parses Marian's names: "ce-mean-words" (the loss), "bleu" and "chrf".
/// Errors: ConfigError for another name.
ValidMetric parse_valid_metric(const std::string& name);
std::string to_string(ValidMetric metric);

/// NaN if it was not computed.
double value_of(const ValidScores& scores, ValidMetric metric);
train::Better better_of(ValidMetric metric);
/// Whether the metric is one of translations.
bool needs_translations(ValidMetric metric);

}  // namespace cohort::translate
