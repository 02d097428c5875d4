// The numbers by which a run is judged while it trains.
#pragma once
#include <string>

#include "cohort/train/early_stopping.h"

namespace cohort::translate {

/// One validation's numbers; those of translations are 0 where nothing was translated.
struct ValidScores {
  double loss = 0;  ///< Mean of -log p over target tokens.
  double bleu = 0;  ///< 0 to 100.
  double chrf = 0;  ///< chrF2, 0 to 100.

  bool operator==(const ValidScores&) const = default;
};

enum class ValidMetric { kLoss, kBleu, kChrf };

/// Parses Marian's names: "ce-mean-words" (the loss), "bleu" and "chrf".
/// Errors: ConfigError for another name.
ValidMetric parse_valid_metric(const std::string& name);
std::string to_string(ValidMetric metric);

double value_of(const ValidScores& scores, ValidMetric metric);
train::Better better_of(ValidMetric metric);
/// Whether the metric is one of translations.
bool needs_translations(ValidMetric metric);

}  // namespace cohort::translate
