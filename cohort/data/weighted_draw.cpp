// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/weighted_draw.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace cohort::data {

std::vector<int64_t> draw_with_replacement(std::span<const double> weights, int64_t count,
                                           SplitMix64& random) {
  std::vector<double> ends(weights.size());
  std::partial_sum(weights.begin(), weights.end(), ends.begin());
  std::vector<int64_t> drawn(static_cast<size_t>(count));
  for (int64_t& number : drawn) {
    // The first end above the point: a number of weight 0 has an empty range and is never hit.
    const auto end = std::upper_bound(ends.begin(), ends.end(), random.uniform() * ends.back());
    number = std::min<int64_t>(end - ends.begin(), static_cast<int64_t>(ends.size()) - 1);
  }
  return drawn;
}

std::vector<int64_t> draw_without_replacement(std::span<const double> weights, int64_t count,
                                              SplitMix64& random) {
  struct Key {
    double arrival;  // -log(u) / w, the smallest first: the order of u^(1/w), without underflow.
    int64_t number;
  };
  std::vector<Key> keys(weights.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = {-std::log1p(-random.uniform()) / weights[i], static_cast<int64_t>(i)};
    if (weights[i] == 0) keys[i].arrival = INFINITY;
  }
  std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    return a.arrival != b.arrival ? a.arrival < b.arrival : a.number < b.number;
  });
  std::vector<int64_t> drawn(static_cast<size_t>(count));
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = keys[i].number;
  return drawn;
}

}  // namespace cohort::data
