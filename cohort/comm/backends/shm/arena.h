// SPDX-License-Identifier: Apache-2.0
// Tensors of one rank in memory that the other ranks of its host see, too.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>

#include "cohort/base/free_pieces.h"
#include "cohort/comm/backends/shm/shared_memory.h"

namespace cohort::comm {

/// Gives out pieces of a part of shared memory, which no other rank gives out.
///
/// A piece that is freed is kept for the next one that it is long enough for, as an allocator of
/// device memory does: its pages are there. The system gets the memory back when the arena goes.
/// Memory:  the most that its tensors take at a time, and what lies between them.
/// Owner:   shared with its tensors, which may outlive the group.
/// Threads: any.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Of `memory`'s room the part [begin, begin + bytes).
  Arena(std::shared_ptr<const SharedMemory> memory, size_t begin, size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Returns `numel` elements of undefined content, on a boundary of kGrain bytes; an ordinary
  /// tensor if they do not fit.
  /// Errors: SharedMemory::commit's.
  at::Tensor empty(int64_t numel, const at::TensorOptions& options);
  /// From now on gives out no memory again: a rank that does not know yet that the group is dead
  /// may still write into what is freed.
  void retire();

  static constexpr size_t kGrain = 4096;

 private:
  std::optional<size_t> take(size_t bytes);
  void give_back(size_t offset, size_t bytes);

  const std::shared_ptr<const SharedMemory> memory_;
  const size_t begin_;
  const size_t bytes_;
  std::mutex mutex_;
  FreePieces free_;  // by offset
  size_t end_ = 0;   // up to here there is memory
  bool retired_ = false;
};

}  // namespace cohort::comm
