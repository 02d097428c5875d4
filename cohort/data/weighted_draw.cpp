// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/weighted_draw.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

namespace cohort::data {

namespace {

// By a power of two, so that the largest is in [1, 2): neither a sum nor 1 / w overflows.
std::vector<double> scaled(std::span<const double> weights) {
  const int exponent = std::ilogb(*std::ranges::max_element(weights));
  std::vector<double> result(weights.size());
  std::ranges::transform(weights, result.begin(),
                         [&](double weight) { return std::scalbn(weight, -exponent); });
  return result;
}

}  // namespace

std::vector<int64_t> draw_with_replacement(std::span<const double> weights, int64_t count,
                                           SplitMix64& random) {
  std::vector<double> ends = scaled(weights);
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
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
    bool is_never;   // Its weight is 0.
    double arrival;  // -log(u) / w, the smallest first: the order of u^(1/w), without underflow.
    int64_t number;
  };
  const std::vector<double> rates = scaled(weights);
  std::vector<Key> keys(weights.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool is_never = weights[i] == 0;
    const double point = random.uniform();
    keys[i] = {is_never, is_never ? 0 : -std::log1p(-point) / rates[i], static_cast<int64_t>(i)};
  }
  std::ranges::sort(
      keys, {}, [](const Key& key) { return std::tuple(key.is_never, key.arrival, key.number); });
  std::vector<int64_t> drawn(static_cast<size_t>(count));
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = keys[i].number;
  return drawn;
}

}  // namespace cohort::data
