// SPDX-License-Identifier: Apache-2.0
// Sums sparse gradients of one table from several pushes.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/ps/id_numbers.h"

namespace cohort::ps {

/// Adds rows up by id. The sum of a row is that of its gradients in the order of `add`'s calls, so
/// its bits are given by that order alone.
///
/// Memory:  that of all distinct rows; kept for the next use.
/// Threads: one.
class RowMerger {
 public:
  /// Forgets all; rows have `width` values from now on, about `expected` of them.
  void begin(int64_t width, size_t expected);
  /// Adds `gradients` [ids.size() x width] to the rows of `ids` (any, repeated ones too).
  void add(std::span<const uint64_t> ids, std::span<const float> gradients);
  /// Divides every sum.
  void divide(float divisor);

  std::span<const uint64_t> ids() const { return numbers_.ids(); }  ///< In the order of arrival.
  std::span<const float> gradients() const { return sums_; }        ///< [ids().size() x width]

 private:
  size_t width_ = 1;
  IdNumbers numbers_;
  std::vector<float> sums_;
};

}  // namespace cohort::ps
