// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/snapshot.h"

#include <sys/mman.h>
#include <torch/types.h>

namespace cohort::train {
namespace {

constexpr size_t kAlignment = 64;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Snapshot::~Snapshot() {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

ShardedParts Snapshot::take(const ShardedParts& parts) {
  size_t bytes = 0;
  for (const auto& [part, shards] : parts) {
    for (const TensorShard& shard : shards) bytes += round_up(shard.tensor.nbytes(), kAlignment);
  }
  if (bytes > memory_.size()) grow(bytes);
  const at::NoGradGuard no_grad;
  ShardedParts copies = parts;
  std::byte* place = memory_.data();
  for (auto& [part, shards] : copies) {
    for (TensorShard& shard : shards) {
      const at::Tensor source = shard.tensor.detach();
      shard.tensor = at::from_blob(place, source.sizes(), at::TensorOptions(source.scalar_type()));
      shard.tensor.copy_(source);
      place += round_up(source.nbytes(), kAlignment);
    }
  }
  return copies;
}

void Snapshot::free_pages() {
  if (!memory_.empty()) ::madvise(memory_.data(), memory_.size(), MADV_DONTNEED);
}

void Snapshot::grow(size_t bytes) {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());  // First: two would be too much.
  memory_ = {};
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "checkpoint: no memory for a copy of ",
                   bytes, " bytes");
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // If there are none, small ones do.
  memory_ = {static_cast<std::byte*>(memory), bytes};
}

}  // namespace cohort::train
