// SPDX-License-Identifier: Apache-2.0
// Seconds of the command line as a duration.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>

namespace cohort::cli {

/// Rounds `seconds`, from 0 to 1e7, to whole milliseconds: to 1 at least if it is above 0, for 0 may
/// mean never.
inline std::chrono::milliseconds to_milliseconds(double seconds) {
  const std::chrono::milliseconds rounded(std::llround(seconds * 1000));
  return seconds > 0 ? std::max(rounded, std::chrono::milliseconds(1)) : rounded;
}

}  // namespace cohort::cli
