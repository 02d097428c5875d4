// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/arena.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <algorithm>
#include <c10/core/CPUAllocator.h>
#include <iterator>
#include <utility>

namespace cohort::comm {

Arena::Arena(std::shared_ptr<const SharedMemory> memory, size_t begin, size_t bytes)
    : memory_(std::move(memory)), begin_(begin), bytes_(bytes) {}

// The other ranks may keep the file for long.
Arena::~Arena() {
  if (end_ > 0) memory_->release(begin_, end_);
}

at::Tensor Arena::empty(int64_t numel, const at::TensorOptions& options) {
  if (numel == 0) return at::empty({0}, options);
  const size_t needed = static_cast<size_t>(numel) * options.dtype().itemsize();
  const size_t bytes = (needed + kGrain - 1) / kGrain * kGrain;
  const std::optional<size_t> offset = take(bytes);
  if (!offset) return at::empty({numel}, options);
  void* data = memory_->data() + begin_ + *offset;
  c10::profiledCPUMemoryReporter().New(data, needed);
  return at::from_blob(
      data, {numel},
      [arena = shared_from_this(), offset = *offset, bytes](void* freed) {
        c10::profiledCPUMemoryReporter().Delete(freed);
        arena->give_back(offset, bytes);
      },
      options);
}

void Arena::retire() {
  const std::lock_guard lock(mutex_);
  retired_ = true;
}

// The shortest piece that is long enough: long ones stay whole.
std::optional<size_t> Arena::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    if (piece->second >= bytes && (best == free_.end() || piece->second < best->second))
      best = piece;
  }
  if (best != free_.end()) {
    const auto [offset, length] = *best;
    free_.erase(best);
    if (length > bytes) free_.emplace(offset + bytes, length - bytes);
    return offset;
  }
  auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  if (last != free_.end() && last->first + last->second != end_) last = free_.end();
  const size_t offset = last == free_.end() ? end_ : last->first;
  if (bytes > bytes_ - offset) return std::nullopt;
  memory_->commit(begin_ + end_, offset + bytes - end_);
  if (last != free_.end()) free_.erase(last);
  end_ = offset + bytes;
  return offset;
}

void Arena::give_back(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (retired_) return;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace cohort::comm
