// SPDX-License-Identifier: Apache-2.0
// A batch's ids, each once: what travels.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/ps/id_numbers.h"

namespace cohort::ps {

/// Distinct ids of a batch, in the order of their first, and where each one's row is among them.
///
/// Memory:  kept for the next batch.
/// Threads: one.
class DistinctIds {
 public:
  /// `ids`: any; `padding`: left out.
  void assign(std::span<const int64_t> ids, const int64_t* padding);
  std::span<const uint64_t> ids() const { return numbers_.ids(); }
  /// For each id of assign(), its row's number; -1 for padding.
  std::span<const int32_t> positions() const { return positions_; }

 private:
  IdNumbers numbers_;
  std::vector<int32_t> positions_;
};

}  // namespace cohort::ps
