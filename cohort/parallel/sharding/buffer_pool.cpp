// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <algorithm>
#include <c10/core/CPUAllocator.h>
#include <cstdint>
#include <iterator>
#include <sys/mman.h>

#include "cohort/comm/shared_tensor.h"

namespace cohort::parallel {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Begins on a boundary of huge pages.
std::byte* map_memory(size_t bytes) {
  void* mapped = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, mapped != MAP_FAILED, "sharding: expected ", bytes,
                   " bytes of memory for parameters or gradients of a unit");
  auto* first = static_cast<std::byte*>(mapped);
  const auto address = reinterpret_cast<uintptr_t>(mapped);
  const size_t before = rounded_up(address, kHugePage) - address;
  if (before > 0) ::munmap(first, before);
  std::byte* begin = first + before;
  ::munmap(begin + bytes, kHugePage - before);
  ::madvise(begin, bytes, MADV_HUGEPAGE);  // If there are none, small ones do.
  return begin;
}

}  // namespace

BufferPool::~BufferPool() {
  shrink(free_bytes_);
}

at::Tensor BufferPool::empty(const comm::ProcessGroup& group, int64_t numel,
                             const at::TensorOptions& options) {
  const size_t needed = static_cast<size_t>(numel) * options.dtype().itemsize();
  if (needed < kHugePage || !options.device().is_cpu() || options.pinned_memory() ||
      comm::shares_tensors(group))
    return comm::empty_shared(group, numel, options);
  const size_t bytes = rounded_up(needed, kPage);
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
  std::byte* begin = take_free(bytes);
  if (!begin) {
    const size_t most = std::max(most_bytes_, used_bytes_ + bytes);
    // Pieces that are too short make room for what is mapped.
    if (used_bytes_ + bytes + free_bytes_ > most) shrink(used_bytes_ + bytes + free_bytes_ - most);
    begin = map_memory(bytes);
  }
  used_bytes_ += bytes;
  most_bytes_ = std::max(most_bytes_, used_bytes_);
  return begin;
}

// Of the shortest piece that is long enough: long ones stay whole. Null: there is none.
std::byte* BufferPool::take_free(size_t bytes) {
  auto best = free_.end();
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    if (piece->second >= bytes && (best == free_.end() || piece->second < best->second))
      best = piece;
  }
  if (best == free_.end()) return nullptr;
  const auto [begin, length] = *best;
  free_.erase(best);
  if (length > bytes) free_.emplace(begin + bytes, length - bytes);
  free_bytes_ -= bytes;
  return begin;
}

void BufferPool::give_back(std::byte* begin, size_t bytes) {
  const std::lock_guard lock(mutex_);
  used_bytes_ -= bytes;
  free_bytes_ += bytes;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(begin, bytes);
}

// Gives `bytes` of what is free back to the system.
void BufferPool::shrink(size_t bytes) {
  while (bytes > 0) {
    const auto last = std::prev(free_.end());
    const size_t length = std::min(bytes, last->second);
    last->second -= length;
    ::munmap(last->first + last->second, length);
    if (last->second == 0) free_.erase(last);
    free_bytes_ -= length;
    bytes -= length;
  }
}

}  // namespace cohort::parallel
