// Copies of slices, to be written while training goes on.
#pragma once
#include <cstddef>
#include <span>

#include "cohort/train/tensor_slice.h"

namespace cohort::train {

/// Copies in the computer's memory, which is kept from one copy to the next: fresh pages cost more
/// time than the copying. Given back when this object ends. Threads: one.
class Snapshot {
 public:
  Snapshot() = default;
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Copies the slices' tensors; those it copied before are no longer valid. Returns the slices
  /// with contiguous tensors that lie in this object's memory.
  /// Errors: c10::OutOfMemoryError.
  SlicedParts take(const SlicedParts& parts);

  /// What is kept: as much as the largest copy so far.
  size_t kept_bytes() const { return memory_.size(); }

 private:
  void grow(size_t bytes);

  std::span<std::byte> memory_;
};

}  // namespace cohort::train
