// SPDX-License-Identifier: Apache-2.0
// Which elements of a tensor a part of it holds, where it is cut along a dimension: as numbers.
#pragma once
#include <cstdint>
#include <vector>

#include "cohort/base/manifest.h"

namespace cohort {

/// The index-th of `count` cuts of `size` things: [size * index / count, size * (index + 1) /
/// count), so that all of them together are [0, size).
ElementRange cut_of(int64_t size, int64_t index, int64_t count);

/// Elements of a part that follow each other in the whole, too.
struct PartRun {
  int64_t part_begin = 0;  ///< The first one's number in the part.
  ElementRange whole;      ///< All of them in the whole.
  bool operator==(const PartRun&) const = default;
};

/// A part of a tensor: `pieces` of its dimension `dim`, one behind the other.
struct TensorPart {
  std::vector<int64_t> shape;        ///< The whole tensor's.
  int64_t dim = 0;                   ///< In [0, dimensions).
  std::vector<ElementRange> pieces;  ///< Ascending, within [0, shape[dim]).

  bool is_whole() const;
  std::vector<int64_t> part_shape() const;
  /// Where elements [begin, end) of the part, counted row by row, lie: in order, runs as long as
  /// can be. A cut of the last dimension makes one for every row.
  /// Errors: c10::ValueError if they are not within the part.
  std::vector<PartRun> runs(ElementRange elements) const;
};

}  // namespace cohort
