// The middle of several measurements.
#pragma once
#include <algorithm>
#include <vector>

namespace cohort::bench {

/// Returns the median of `values`, of which there is at least one; of an even number the upper one.
inline double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace cohort::bench
