// SPDX-License-Identifier: Apache-2.0
// What is left until a deadline. Not installed.
#pragma once
#include <algorithm>
#include <chrono>

namespace cohort::comm {

/// Returns what is left until `deadline`, at least 1 ms: calls take 0 or less for no limit.
inline std::chrono::milliseconds time_left(std::chrono::steady_clock::time_point deadline) {
  return std::max(
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()),
      std::chrono::milliseconds(1));
}

}  // namespace cohort::comm
