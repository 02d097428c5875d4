// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/pages.h"

#include <cstdint>
#include <fstream>
#include <new>
#include <string>
#include <sys/mman.h>

namespace cohort::ps {
namespace {

std::span<std::byte> whole_pages(std::span<std::byte> memory, size_t page) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const size_t before = (page - begin % page) % page;
  if (memory.size() < before + page) return {};
  return memory.subspan(before, (memory.size() - before) / page * page);
}

}  // namespace

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

void discard(std::span<std::byte> memory) {
  constexpr size_t kSmallPage = 4096;
  memory = whole_pages(memory, kSmallPage);
  if (!memory.empty()) ::madvise(memory.data(), memory.size(), MADV_DONTNEED);
}

std::span<std::byte> whole_huge_pages(std::span<std::byte> memory) {
  return whole_pages(memory, kHugePage);
}

void collapse(std::span<std::byte> memory) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack.
  // The call does not ask for the system's setting.
  static const bool has_huge_pages = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    std::string setting;
    return std::getline(file, setting) && setting.find("[never]") == setting.npos;
  }();
  if (!has_huge_pages || ::madvise(memory.data(), memory.size(), kCollapse) == 0) return;
  // It ends at a page that was never written, for example.
  for (; memory.size() >= kHugePage; memory = memory.subspan(kHugePage))
    ::madvise(memory.data(), kHugePage, kCollapse);
}

}  // namespace cohort::ps
