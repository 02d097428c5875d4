// SPDX-License-Identifier: Apache-2.0
// The middle of several measurements.
#pragma once
#include <algorithm>
#include <vector>

namespace cohort::bench {

/// Returns the median of `values`, of which there is at least one; of an even number the mean of the two in the middle.
inline double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t upper = values.size() / 2;
  return values.size() % 2 == 1 ? values[upper] : (values[upper - 1] + values[upper]) / 2;
}

}  // namespace cohort::bench
