// SPDX-License-Identifier: Apache-2.0
// A row of an embedding table as others see it.
#pragma once
#include <cstdint>
#include <span>

namespace cohort::ps {

/// A row as files have it; spans point into the table until its next change.
struct RowView {
  uint64_t id = 0;
  uint32_t last_push = 0;  ///< Seconds since 1970 of the last push.
  uint32_t pushes = 0;     ///< Counts those that were applied, saturating; at least 1.
  std::span<const float> weights{};
  std::span<const float> state{};
};

}  // namespace cohort::ps
