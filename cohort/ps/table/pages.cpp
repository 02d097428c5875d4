// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/pages.h"

#include <cstdint>
#include <new>
#include <sys/mman.h>

namespace cohort::ps {

Pages::Pages(size_t bytes, size_t small_bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const size_t mapped = bytes + kHugePage;
  void* start = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<std::byte*>(start);
  const size_t skipped = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  data_ = first + skipped;
  if (skipped > 0) ::munmap(first, skipped);
  ::munmap(data_ + bytes, mapped - skipped - bytes);
  // Advice: a system without huge pages refuses it, and works on.
  if (small_bytes > 0) ::madvise(data_, small_bytes, MADV_NOHUGEPAGE);
  if (bytes > small_bytes) ::madvise(data_ + small_bytes, bytes - small_bytes, MADV_HUGEPAGE);
}

Pages::~Pages() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void Pages::make_huge() {
  if (data_ != nullptr) ::madvise(data_, bytes_, MADV_HUGEPAGE);
}

void collapse(std::span<std::byte> memory) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack.
  ::madvise(memory.data(), memory.size(), kCollapse);
}

}  // namespace cohort::ps
