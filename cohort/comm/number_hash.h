// SPDX-License-Identifier: Apache-2.0
// A hash of numbers that is the same in every process, for what ranks compare or match by.
#pragma once
#include <cstdint>

namespace cohort::comm {

/// FNV-1a over numbers of 64 bits.
class NumberHash {
 public:
  /// `before`: a hash that this one continues.
  explicit NumberHash(uint32_t before = 0) : value_(0xcbf29ce484222325ULL ^ before) {}

  NumberHash& add(int64_t number) {
    value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x100000001b3ULL;
    return *this;
  }
  uint32_t value() const { return static_cast<uint32_t>(value_ ^ (value_ >> 32U)); }
  /// As c10d and Gloo take one: >= 0.
  int tag() const { return static_cast<int>(value() & 0x7fffffffU); }

 private:
  uint64_t value_;
};

}  // namespace cohort::comm
