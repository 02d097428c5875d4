// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/batch_rules.h"

#include <cmath>
#include <sstream>

#include "cohort/base/error.h"

namespace cohort::train {

int64_t local_batch(int64_t global_batch, int world_size) {
  const auto text = [&] {
    return "batch of " + std::to_string(global_batch) + " examples on " +
           std::to_string(world_size) + " ranks: ";
  };
  if (global_batch < 1 || world_size < 1) throw ConfigError(text() + "expected both above 0");
  if (global_batch % world_size != 0) {
    throw ConfigError(text() + "expected a multiple of " + std::to_string(world_size));
  }
  return global_batch / world_size;
}

int64_t effective_batch(int64_t local_batch, int world_size, int64_t accumulation) {
  return local_batch * world_size * accumulation;
}

LearningRateRule parse_learning_rate_rule(const std::string& text) {
  if (text == "none") return LearningRateRule::kNone;
  if (text == "linear") return LearningRateRule::kLinear;
  if (text == "sqrt") return LearningRateRule::kSquareRoot;
  throw ConfigError("learning-rate rule " + text + ": expected none, linear or sqrt");
}

double scaled_learning_rate(double base, int64_t base_batch, int64_t batch, LearningRateRule rule) {
  if (base_batch < 1 || batch < 1) {
    throw ConfigError("learning rate for a batch of " + std::to_string(batch) +
                      " where the base is " + std::to_string(base_batch) +
                      ": expected both above 0");
  }
  const double ratio = static_cast<double>(batch) / static_cast<double>(base_batch);
  switch (rule) {
    case LearningRateRule::kNone:
      break;
    case LearningRateRule::kLinear:
      return base * ratio;
    case LearningRateRule::kSquareRoot:
      return base * std::sqrt(ratio);
  }
  return base;
}

std::string describe_learning_rate(double base, int64_t base_batch, int64_t batch,
                                   LearningRateRule rule) {
  std::ostringstream out;
  const double rate = scaled_learning_rate(base, base_batch, batch, rule);
  switch (rule) {
    case LearningRateRule::kNone:
      out << base;
      break;
    case LearningRateRule::kLinear:
      out << base << " x " << batch << " / " << base_batch << " = " << rate << " (linear)";
      break;
    case LearningRateRule::kSquareRoot:
      out << base << " x sqrt(" << batch << " / " << base_batch << ") = " << rate << " (sqrt)";
      break;
  }
  return out.str();
}

}  // namespace cohort::train
