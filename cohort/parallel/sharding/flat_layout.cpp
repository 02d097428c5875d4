#include "cohort/parallel/sharding/flat_layout.h"

#include <algorithm>
#include <c10/util/Exception.h>

namespace cohort::parallel {

FlatLayout::FlatLayout(std::vector<FlatTensor> tensors, int num_shards)
    : tensors_(std::move(tensors)), num_shards_(num_shards) {
  TORCH_CHECK_VALUE(num_shards > 0, "flat layout: expected one shard or more, got ", num_shards);
  for (FlatTensor& tensor : tensors_) {
    tensor.begin = numel_;
    numel_ += tensor.numel;
  }
  shard_numel_ = (numel_ + num_shards - 1) / num_shards;
}

std::vector<FlatSlice> FlatLayout::slices(int rank) const {
  const int64_t first = rank * shard_numel_;
  const int64_t last = first + shard_numel_;
  std::vector<FlatSlice> slices;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const FlatTensor& tensor = tensors_[i];
    const int64_t begin = std::max(first, tensor.begin);
    const int64_t end = std::min(last, tensor.begin + tensor.numel);
    if (begin >= end) continue;
    slices.push_back({i, begin - tensor.begin, end - tensor.begin, begin - first});
  }
  return slices;
}

}  // namespace cohort::parallel
