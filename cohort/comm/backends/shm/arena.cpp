// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/arena.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
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

// Grows by what the free piece at the end lacks, if no piece is long enough.
std::optional<size_t> Arena::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const auto offset = free_.take(bytes)) return offset;
  const size_t missing = bytes - free_.bytes_before(end_);
  if (missing > bytes_ - end_) return std::nullopt;
  memory_->commit(begin_ + end_, missing);
  free_.give_back(end_, missing);
  end_ += missing;
  return free_.take(bytes);
}

void Arena::give_back(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!retired_) free_.give_back(offset, bytes);
}

}  // namespace cohort::comm
