// SPDX-License-Identifier: Apache-2.0
// Draws a translation's next token at random instead of taking the likeliest.
#pragma once
#include <cstdint>
#include <span>

#include "cohort/nmt/fused.h"

namespace cohort::nmt {

/// From which tokens one is drawn, and how likely each is: p is the model's, to the power of
/// 1 / temperature and divided by the sum; of the `topk` likeliest tokens, those are left that
/// together first reach `topp`, and p is divided by what they reach.
///
/// Source: Fan et al. 2018, arXiv:1805.04833 (topk); Holtzman et al. 2020, arXiv:1904.09751 (topp).
struct SamplingOptions {
  bool enabled = false;    ///< false: search for the likeliest.
  int64_t topk = 0;        ///< 0: all tokens.
  double topp = 1;         ///< In (0, 1]; 1: all of these.
  double temperature = 1;  ///< Above 0; below 1 the likely become likelier.
  uint64_t seed = 1;
};

/// Throws ConfigError that names the field if a value is out of range.
void validate(const SamplingOptions& options);

/// Returns a number in [0, 1) that is a function of the arguments: whatever the batches, sample
/// `sample` of sentence `sentence` draws the same ones.
double sampling_number(uint64_t seed, int64_t sentence, int64_t sample, int64_t position);

/// Returns the column that `number`, in [0, 1), draws from `row`; never one of `banned`.
/// Errors: c10::Error if nothing is left to draw from.
Candidate draw(const LogProbs& log_probs, int64_t row, const SamplingOptions& options,
               std::span<const int64_t> banned, double number);

}  // namespace cohort::nmt
