// SPDX-License-Identifier: Apache-2.0
// How batch size and learning rate follow the number of ranks.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::train {

/// Returns a rank's share of a global batch of `global_batch` examples.
/// Errors: ConfigError that names both numbers if world_size does not divide global_batch, or one
///         of them is not positive.
int64_t local_batch(int64_t global_batch, int world_size);

/// Returns the examples behind one optimizer step: local batch x ranks x accumulated batches.
int64_t effective_batch(int64_t local_batch, int world_size, int64_t accumulation = 1);

/// How the learning rate follows the effective batch.
enum class LearningRateRule {
  kNone,        ///< It does not.
  kLinear,      ///< In proportion. Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1.
  kSquareRoot,  ///< With the root. Source: Krizhevsky 2014, arXiv:1404.5997, section 5.
};

/// Reads "none", "linear" or "sqrt".
/// Errors: ConfigError that lists them.
LearningRateRule parse_learning_rate_rule(const std::string& text);

/// Returns the learning rate for batches of `batch`, where `base` is right for `base_batch`.
/// Errors: ConfigError if a batch is not positive.
double scaled_learning_rate(double base, int64_t base_batch, int64_t batch, LearningRateRule rule);

/// Returns the rule's arithmetic as one line for a log: "0.1 x 512 / 256 = 0.2 (linear)".
std::string describe_learning_rate(double base, int64_t base_batch, int64_t batch,
                                   LearningRateRule rule);

}  // namespace cohort::train
