// SPDX-License-Identifier: Apache-2.0
// Which pieces of a range of memory are free.
#pragma once
#include <cstddef>
#include <map>
#include <optional>

namespace cohort {

/// Free pieces of memory, each by the offset or address that it begins at, and its length. Pieces
/// that touch become one.
/// Threads: none of its own; not for several at once.
class FreePieces {
 public:
  /// Takes `bytes` of the shortest piece that is long enough, so that long ones stay whole, and
  /// returns where they begin; nothing if no piece is long enough. In time linear in the pieces.
  std::optional<size_t> take(size_t bytes);
  /// Makes [begin, begin + bytes) free. No part of it may be free already.
  void give_back(size_t begin, size_t bytes);
  /// Returns how many bytes right before `end` are free.
  size_t bytes_before(size_t end) const;
  /// Takes all pieces: lengths by where they begin.
  std::map<size_t, size_t> take_all();

 private:
  std::map<size_t, size_t> pieces_;
};

}  // namespace cohort
