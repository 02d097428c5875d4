// SPDX-License-Identifier: Apache-2.0
// Hyperparameters of the optimizer, on ranks and on servers.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cohort/ps/update_rule.h"

namespace imagenet {

constexpr int64_t kEpochsPerRate = 30;  ///< Then a tenth of the learning rate.

struct OptimizerOptions {
  double learning_rate = 0.1;  ///< Of epoch 0, for the global batch.
  double momentum = 0.9;
  double weight_decay = 1e-4;
  int64_t steps_per_epoch = 1;
};

/// What servers run, but for weight decay. `shares`: pushes that a step is made of, 1 where servers
/// sum them first: each takes its share of the learning rate, so that N trainers of ps-async move
/// the parameters in their N pushes as far as one step of all.
inline cohort::ps::RuleOptions server_rule(const OptimizerOptions& options, int shares) {
  using cohort::ps::Schedule;
  const int64_t period = kEpochsPerRate * std::max<int64_t>(options.steps_per_epoch, 1);
  return {.rule = cohort::ps::Rule::kMomentum,
          .learning_rate = static_cast<float>(options.learning_rate / shares),
          .momentum = static_cast<float>(options.momentum),
          .schedule = {
              .kind = Schedule::Kind::kSteps, .period = static_cast<double>(period), .fall = 0.1}};
}

}  // namespace imagenet
