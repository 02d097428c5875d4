// SPDX-License-Identifier: Apache-2.0
// Waits for what another thread or process brings about.
#pragma once
#include <chrono>
#include <functional>
#include <thread>

namespace cohort::test {

/// Returns true as soon as `condition` holds; false if it does not within `limit`.
inline bool eventually(const std::function<bool()>& condition,
                       std::chrono::seconds limit = std::chrono::seconds(30)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace cohort::test
