// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/valid_metric.h"

#include <cmath>

#include "cohort/base/error.h"

namespace cohort::translate {

ValidMetric parse_valid_metric(const std::string& name) {
  for (const ValidMetric metric : {ValidMetric::kLoss, ValidMetric::kBleu, ValidMetric::kChrf})
    if (name == to_string(metric)) return metric;
  throw ConfigError("--valid-metrics " + name + ": expected bleu, chrf or ce-mean-words");
}

std::string to_string(ValidMetric metric) {
  switch (metric) {
    case ValidMetric::kBleu:
      return "bleu";
    case ValidMetric::kChrf:
      return "chrf";
    case ValidMetric::kLoss:
      break;
  }
  return "ce-mean-words";
}

double value_of(const ValidScores& scores, ValidMetric metric) {
  switch (metric) {
    case ValidMetric::kBleu:
      return scores.bleu.value_or(std::nan(""));
    case ValidMetric::kChrf:
      return scores.chrf.value_or(std::nan(""));
    case ValidMetric::kLoss:
      break;
  }
  return scores.loss;
}

train::Better better_of(ValidMetric metric) {
  return metric == ValidMetric::kLoss ? train::Better::kLower : train::Better::kHigher;
}

bool needs_translations(ValidMetric metric) {
  return metric != ValidMetric::kLoss;
}

}  // namespace cohort::translate
