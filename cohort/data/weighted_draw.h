// SPDX-License-Identifier: Apache-2.0
// Draws numbers in proportion to weights.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/data/random.h"

namespace cohort::data {

/// Returns `count` numbers i of [0, weights.size()), each drawn with probability w_i / sum.
/// `weights` are finite and >= 0, one at least above 0.
/// Cost: O(N + count log N).
std::vector<int64_t> draw_with_replacement(std::span<const double> weights, int64_t count,
                                           SplitMix64& random);

/// Returns `count` different numbers, drawn one by one in proportion to the weights of those left.
/// At least `count` weights are above 0.
/// Cost:   O(N log N).
/// Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir", algorithm A:
///         the numbers with the largest u_i^(1/w_i), u_i uniform.
std::vector<int64_t> draw_without_replacement(std::span<const double> weights, int64_t count,
                                              SplitMix64& random);

}  // namespace cohort::data
