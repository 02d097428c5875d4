// SPDX-License-Identifier: Apache-2.0
// The n smallest of very many keys, in little memory.
#pragma once
#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
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

/// What nth_key() has seen of one part: how often each value of two digits, and keys.
struct SeenKeys {
  static constexpr size_t kValues = 1 << 16;
  std::vector<int64_t> now = std::vector<int64_t>(kValues);
  std::vector<int64_t> next = std::vector<int64_t>(kValues);
  std::vector<OrderKey> rest{};
};

/// Returns the `count`-th smallest key, `count` >= 1 and at most their number.
///
/// The keys are in parts, which `run(work)` lets several threads read: it calls `work(part)` once
/// for each part in [0, parts). `scan(part, visit)` calls `visit(key)` for each key of a part, the
/// same ones each time. It runs three to five times over keys as rows have them: digit by digit,
/// until what is left fits `few`.
/// Memory: 1 MiB a part.
template <class Run, class Scan>
OrderKey nth_key(size_t parts, const Run& run, const Scan& scan, int64_t count,
                 int64_t few = 1 << 16) {
  constexpr int kDigits = 8;
  std::vector<SeenKeys> seen(parts);
  SeenKeys& all = seen.front();
  OrderKey prefix;
  for (int known = 0; known < kDigits;) {
    // The next digit is counted along: where all keys share this one it need not be read again.
    const int following = std::min(known + 1, kDigits - 1);
    run([&](size_t part) {
      SeenKeys& its = seen[part];
      std::fill(its.now.begin(), its.now.end(), 0);
      std::fill(its.next.begin(), its.next.end(), 0);
      scan(part, [&](const OrderKey& key) {
        if (!key.begins_as(prefix, known)) return;
        ++its.now[key.digit(known)];
        ++its.next[key.digit(following)];
      });
    });
    for (size_t part = 1; part < seen.size(); ++part) {
      for (size_t value = 0; value < SeenKeys::kValues; ++value) {
        all.now[value] += seen[part].now[value];
        all.next[value] += seen[part].next[value];
      }
    }
    int64_t left = 0;
    for (auto* digits : {&all.now, &all.next}) {
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
    run([&](size_t part) {
      scan(part, [&](const OrderKey& key) {
        if (key.begins_as(prefix, known)) seen[part].rest.push_back(key);
      });
    });
    for (size_t part = 1; part < seen.size(); ++part)
      all.rest.insert(all.rest.end(), seen[part].rest.begin(), seen[part].rest.end());
    std::nth_element(all.rest.begin(), all.rest.begin() + (count - 1), all.rest.end());
    return all.rest[static_cast<size_t>(count - 1)];
  }
  return prefix;
}

}  // namespace cohort::ps
