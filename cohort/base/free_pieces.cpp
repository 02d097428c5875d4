// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/free_pieces.h"

#include <iterator>
#include <utility>

namespace cohort {

std::optional<size_t> FreePieces::take(size_t bytes) {
  auto best = pieces_.end();
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    if (piece->second >= bytes && (best == pieces_.end() || piece->second < best->second))
      best = piece;
  }
  if (best == pieces_.end()) return std::nullopt;
  const auto [begin, length] = *best;
  pieces_.erase(best);
  if (length > bytes) pieces_.emplace(begin + bytes, length - bytes);
  return begin;
}

void FreePieces::give_back(size_t begin, size_t bytes) {
  auto next = pieces_.lower_bound(begin);
  if (next != pieces_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = pieces_.erase(next);
  }
  if (next != pieces_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  pieces_.emplace(begin, bytes);
}

size_t FreePieces::bytes_before(size_t end) const {
  const auto next = pieces_.lower_bound(end);
  if (next == pieces_.begin()) return 0;
  const auto& [begin, bytes] = *std::prev(next);
  return begin + bytes == end ? bytes : 0;
}

std::map<size_t, size_t> FreePieces::take_all() {
  return std::exchange(pieces_, {});
}

}  // namespace cohort
