// SPDX-License-Identifier: Apache-2.0
// Zeroed memory from the system, in huge pages where it has them.
#pragma once
#include <cstddef>
#include <span>
#include <utility>

namespace cohort::ps {

constexpr size_t kHugePage = size_t{2} << 20;

/// Asks for the cache line of `address`, which is used soon: into L2, for more can be under way to it
/// than to L1. GCC 12 drops calls of functions that only prefetch, as if they did nothing: this one,
/// and those that call it, must be inlined.
[[gnu::always_inline]] inline void prefetch_line(const void* address) {
  __builtin_prefetch(address, /*rw=*/0, /*locality=*/1);
}

/// Owns a range of memory that begins at a multiple of kHugePage; what was never written takes
/// none.
///
/// A random access to rows in pages of 4 KiB mostly misses the TLB as well: huge pages halve it.
class Pages {
 public:
  Pages() = default;
  /// `small_bytes` at the beginning (a multiple of kHugePage, or 0) stay small pages until
  /// make_huge(), so that little use takes little memory.
  /// Errors: std::bad_alloc.
  explicit Pages(size_t bytes, size_t small_bytes = 0);
  ~Pages();
  Pages(Pages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// The kernel may now gather all of it in huge pages.
  void make_huge();

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Gives what the whole small pages (4 KiB) of `memory` hold back to the system: they read as zeros.
void discard(std::span<std::byte> memory);

/// Returns the part of `memory` that is whole huge pages; empty if there are none.
std::span<std::byte> whole_huge_pages(std::span<std::byte> memory);

/// Gathers each 2 MiB of `memory`, which begins at a multiple of that, in a huge page again, if
/// anything of it was written. After a fork each huge page that one of the two processes writes
/// becomes 512 small ones, and the kernel's own thread gathers 1.6 MB a second.
///
/// Blocks for some 0.5 ms a huge page that is gathered; other threads may use the memory meanwhile.
/// While a forked child lives, what is gathered is there twice. Changes nothing where the kernel has
/// no such call (before Linux 6.1), no huge page is left, or the system is set to have none.
void collapse(std::span<std::byte> memory);

}  // namespace cohort::ps
