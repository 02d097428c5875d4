// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <cstdint>
#include <sys/mman.h>

#include "cohort/comm/shared_tensor.h"

namespace cohort::parallel {
namespace {

// Pieces begin and end on a boundary of these.
constexpr size_t kHugePage = size_t{2} << 20;

void check_memory(bool there, size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, there, "sharding: expected ", bytes,
                   " bytes of memory for parameters or gradients of a unit");
}

// Addresses without memory.
std::byte* reserve(size_t bytes) {
  void* mapped = ::mmap(nullptr, bytes + kHugePage, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check_memory(mapped != MAP_FAILED, bytes);
  auto* first = static_cast<std::byte*>(mapped);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(mapped) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(first, before);
  std::byte* begin = first + before;
  ::munmap(begin + bytes, kHugePage - before);
  return begin;
}

}  // namespace

BufferPool::~BufferPool() {
  release_free();
}

void BufferPool::release_free() {
  const std::lock_guard lock(mutex_);
  for (const auto& [begin, bytes] : free_.take_all())
    ::munmap(reinterpret_cast<void*>(begin), bytes);
}

at::Tensor BufferPool::empty(const comm::ProcessGroup& group, int64_t numel,
                             const at::TensorOptions& options) {
  const size_t needed = static_cast<size_t>(numel) * options.dtype().itemsize();
  if (needed < kHugePage || !options.device().is_cpu() || options.pinned_memory() ||
      comm::shares_tensors(group))
    return comm::empty_shared(group, numel, options);
  const size_t bytes = (needed + kHugePage - 1) / kHugePage * kHugePage;
  std::byte* begin = take(bytes);
  c10::profiledCPUMemoryReporter().New(begin, needed);
  return at::from_blob(
      begin, {numel},
      [pool = shared_from_this(), begin, bytes](void* freed) {
        c10::profiledCPUMemoryReporter().Delete(freed);
        pool->give_back(begin, bytes);
      },
      options);
}

std::byte* BufferPool::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto begin = free_.take(bytes);
  return begin ? reinterpret_cast<std::byte*>(*begin) : assemble(bytes);
}

// Of pages from pieces that are too short, and of new ones.
std::byte* BufferPool::assemble(size_t bytes) {
  std::byte* begin = reserve(bytes);
  // The system takes back what has been moved, too.
  const auto check = [&](bool done) {
    if (!done) ::munmap(begin, bytes);
    check_memory(done, bytes);
  };
  size_t moved = 0;
  for (; moved < bytes; moved += kHugePage) {
    const auto page = free_.take(kHugePage);
    if (!page) break;
    const bool done = ::mremap(reinterpret_cast<void*>(*page), kHugePage, kHugePage,
                               MREMAP_MAYMOVE | MREMAP_FIXED, begin + moved) != MAP_FAILED;
    if (!done) free_.give_back(*page, kHugePage);
    check(done);
  }
  if (moved == bytes) return begin;
  check(::mprotect(begin + moved, bytes - moved, PROT_READ | PROT_WRITE) == 0);
  ::madvise(begin + moved, bytes - moved, MADV_HUGEPAGE);  // If there are none, small ones do.
  return begin;
}

void BufferPool::give_back(std::byte* begin, size_t bytes) {
  const std::lock_guard lock(mutex_);
  free_.give_back(reinterpret_cast<size_t>(begin), bytes);
}

}  // namespace cohort::parallel
