// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/flat_layout.h"

#include <algorithm>
#include <c10/util/Exception.h>

namespace cohort::parallel {

FlatLayout::FlatLayout(std::vector<FlatTensor> tensors, int num_shards, int64_t alignment)
    : tensors_(std::move(tensors)), num_shards_(num_shards) {
  TORCH_CHECK_VALUE(num_shards > 0, "flat layout: expected one shard or more, got ", num_shards);
  TORCH_CHECK_VALUE(alignment > 0, "flat layout: expected an alignment above 0, got ", alignment);
  const auto align = [&](int64_t n) { return (n + alignment - 1) / alignment * alignment; };
  int64_t end = 0;
  for (FlatTensor& tensor : tensors_) {
    tensor.begin = align(end);
    end = tensor.begin + tensor.numel;
    numel_ += tensor.numel;
  }
  shard_numel_ = align((end + num_shards - 1) / num_shards);
}

std::vector<std::pair<int64_t, int64_t>> FlatLayout::gaps() const {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t end = 0;
  const auto reach = [&](int64_t begin) {
    if (begin > end) gaps.emplace_back(end, begin);
  };
  for (const FlatTensor& tensor : tensors_) {
    reach(tensor.begin);
    end = tensor.begin + tensor.numel;
  }
  reach(padded_numel());
  return gaps;
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
