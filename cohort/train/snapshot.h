// SPDX-License-Identifier: Apache-2.0
// Copies of shards, to be written while training continues.
#pragma once
#include <cstddef>
#include <span>

#include "cohort/train/tensor_shard.h"

namespace cohort::train {

/// Copies in the computer's memory, on huge pages where the kernel has them: small fresh pages cost
/// more time than the copying. The memory goes back to the kernel with free_pages().
/// Threads: one at a time.
class Snapshot {
 public:
  Snapshot() = default;
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Copies the shards' tensors; those it copied before are no longer valid. Returns the shards
  /// with contiguous tensors that lie in this object's memory.
  /// Errors: c10::OutOfMemoryError.
  ShardedParts take(const ShardedParts& parts);

  /// Ends the copies' validity and gives their pages to the kernel; take() may be called again.
  void free_pages();

 private:
  void grow(size_t bytes);

  std::span<std::byte> memory_;
};

}  // namespace cohort::train
