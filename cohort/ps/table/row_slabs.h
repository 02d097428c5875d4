// SPDX-License-Identifier: Apache-2.0
// Rows of one width in large pieces of memory, by the number of their place.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/ps/table/pages.h"

namespace cohort::ps {

/// A row in memory; its weights and then its state follow at once: rows begin at multiples of 4.
/// Files have the same bytes.
struct [[gnu::packed, gnu::aligned(4)]] Row {
  uint64_t id;
  uint32_t last_push;
  uint32_t pushes;  ///< 0: the place is free.

  float* floats() {
    return reinterpret_cast<float*>(this + 1);
  }
  const float* floats() const {
    return reinterpret_cast<const float*>(this + 1);
  }
};
static_assert(sizeof(Row) == 16);

/// Owns rows of `floats` floats each. A row stays where it is until it is freed; places of freed
/// rows are used again, the last first.
/// Threads: one at a time.
class RowSlabs {
 public:
  static constexpr uint64_t kMaxRows = 0xffff'fffe;

  explicit RowSlabs(int64_t floats)
      : stride_(sizeof(Row) + sizeof(float) * static_cast<size_t>(floats)) {}

  size_t stride() const { return stride_; }  ///< Bytes from row to row.

  // `const` is of the table, not of the memory that it owns.
  Row* at(uint32_t place) const {
    return reinterpret_cast<Row*>(slabs_[place >> kSlabBits].data() +
                                  (place & (kSlabRows - 1)) * stride_);
  }
  [[gnu::always_inline]] void prefetch(uint32_t place) const {
    const auto* row = reinterpret_cast<const char*>(at(place));
    const size_t bytes = stride_ < kPrefetched ? stride_ : kPrefetched;
    for (size_t i = 0; i < bytes; i += 64) prefetch_line(row + i);
    prefetch_line(row + bytes - 1);  // A row may begin anywhere in a cache line.
  }

  /// Returns the number of a place whose content is to be written, `pushes` > 0.
  /// Errors: std::bad_alloc; c10::Error at kMaxRows.
  uint32_t allocate();
  void free(uint32_t place);

  /// Places below this one were used once.
  uint32_t end() const { return end_; }
  /// Of memory, free places included.
  int64_t bytes() const;
  /// The memory that is in huge pages, where the system has them.
  std::vector<std::span<std::byte>> huge_pages() const;

 private:
  // A multiple of kHugePage whatever the stride: both are divisible by 4.
  static constexpr int kSlabBits = 19;
  static constexpr uint32_t kSlabRows = uint32_t{1} << kSlabBits;
  static constexpr size_t kPrefetched = 512;  // The rest the CPU foresees.
  static constexpr uint32_t kNone = 0xffff'ffff;

  size_t stride_;
  std::vector<Pages> slabs_;
  uint32_t end_ = 0;
  uint32_t free_ = kNone;  // The first free place; its id is the next one's number.
};

}  // namespace cohort::ps
