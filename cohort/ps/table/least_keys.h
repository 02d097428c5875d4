// SPDX-License-Identifier: Apache-2.0
// The n smallest of very many keys, in little memory.
#pragma once
#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <vector>

namespace cohort::ps {

/// A row's place in an order: by `high`, then by `low`. No two rows have the same.
struct OrderKey {
  uint64_t high = 0;
  uint64_t low = 0;
  auto operator<=>(const OrderKey&) const = default;

  /// 16 bits of it, the most significant ones first; `number` in [0, 8).
  uint32_t digit(int number) const {
    const uint64_t word = number < 4 ? high : low;
    return static_cast<uint32_t>(word >> (48 - number % 4 * 16)) & 0xffff;
  }
  /// Whether the first `digits` digits are those of `other`.
  bool begins_as(const OrderKey& other, int digits) const {
    for (int i = 0; i < digits; ++i) {
      if (digit(i) != other.digit(i)) return false;
    }
    return true;
  }
  void set_digit(int number, uint64_t value) {
    (number < 4 ? high : low) |= value << (48 - number % 4 * 16);
  }
};

/// Returns the `count`-th smallest key, `count` >= 1 and at most their number.
///
/// `scan(visit)` calls `visit(key)` for each, the same ones each time. It runs three to five times
/// over keys as rows have them: digit by digit, until what is left fits `few`.
/// Memory: 1 MiB.
template <class Scan>
OrderKey nth_key(const Scan& scan, int64_t count, int64_t few = 1 << 16) {
  constexpr int kDigits = 8;
  OrderKey prefix;
  std::vector<int64_t> now(1 << 16);
  std::vector<int64_t> next(1 << 16);
  for (int known = 0; known < kDigits;) {
    // The next digit is counted along: where all keys share this one it need not be read again.
    std::fill(now.begin(), now.end(), 0);
    std::fill(next.begin(), next.end(), 0);
    const int following = std::min(known + 1, kDigits - 1);
    scan([&](const OrderKey& key) {
      if (!key.begins_as(prefix, known)) return;
      ++now[key.digit(known)];
      ++next[key.digit(following)];
    });
    int64_t left = 0;
    for (auto* digits : {&now, &next}) {
      if (known == kDigits) break;
      int64_t total = 0;
      uint64_t value = 0;
      for (const int64_t number : *digits) total += number;
      while (count > (*digits)[value]) count -= (*digits)[value++];
      prefix.set_digit(known++, value);
      left = (*digits)[value];
      if (left < total) break;
    }
    if (left > few) continue;
    std::vector<OrderKey> rest;
    scan([&](const OrderKey& key) {
      if (key.begins_as(prefix, known)) rest.push_back(key);
    });
    std::nth_element(rest.begin(), rest.begin() + (count - 1), rest.end());
    return rest[static_cast<size_t>(count - 1)];
  }
  return prefix;
}

}  // namespace cohort::ps
