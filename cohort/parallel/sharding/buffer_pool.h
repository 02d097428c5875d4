// SPDX-License-Identifier: Apache-2.0
// Memory for tensors that come and go in every step.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstddef>
#include <memory>
#include <mutex>

#include "cohort/base/free_pieces.h"
#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// Keeps the memory of a tensor that has gone for the next ones: its pages are there. The C library
/// gives blocks of this size back to the system, and every page of the next one is a fault.
///
/// Only for tensors on the CPU, of 2 MiB or more, not pinned, where the group's backend keeps no
/// such memory itself (comm::empty_shared). Huge pages, where the system has them.
/// Owner:   shared with its tensors; made by make_shared.
/// Memory:  never more than its tensors have taken at a time so far, each a multiple of 2 MiB. Goes
///          back with the pool. A tensor that no free piece is long enough for gets the pages of
///          several: they move to new addresses.
/// Threads: any.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Returns `numel` elements of undefined content, of one dimension, as comm::empty_shared(group,
  /// numel, options) does. Local.
  /// Errors: c10::OutOfMemoryError in one line if the system refuses so much memory.
  at::Tensor empty(const comm::ProcessGroup& group, int64_t numel,
                   const at::TensorOptions& options);

  /// Gives all that no tensor has back to the system. Local.
  void release_free();

 private:
  std::byte* take(size_t bytes);
  std::byte* assemble(size_t bytes);
  void give_back(std::byte* begin, size_t bytes);

  std::mutex mutex_;
  FreePieces free_;  // by address
};

}  // namespace cohort::parallel
