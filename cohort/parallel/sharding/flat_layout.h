// SPDX-License-Identifier: Apache-2.0
// Tensors end to end in one flat buffer, and the equal shards that ranks hold of it. Pure numbers.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cohort::parallel {

/// A tensor's place in the buffer, in elements.
struct FlatTensor {
  std::string name;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t numel = 0;
};

/// The part of a tensor that a shard holds: elements [begin, end) of the tensor, counted row by
/// row, which lie at `offset` in the shard.
struct FlatSlice {
  size_t tensor = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t offset = 0;

  bool operator==(const FlatSlice&) const = default;
};

/// Cuts the buffer by elements, whatever tensors lie there. Every tensor and every shard begins at
/// a multiple of `alignment`: shards differ by what that leaves between tensors and at the end,
/// less than `alignment` for each tensor and for each shard.
class FlatLayout {
 public:
  /// Errors: c10::ValueError if num_shards or alignment < 1.
  FlatLayout(std::vector<FlatTensor> tensors, int num_shards, int64_t alignment = 1);

  const std::vector<FlatTensor>& tensors() const { return tensors_; }
  int64_t numel() const { return numel_; }              ///< Of all tensors, without padding.
  int64_t shard_numel() const { return shard_numel_; }  ///< Of each shard, padding included.
  int64_t padded_numel() const { return shard_numel_ * num_shards_; }
  /// What shard `rank` holds, in order; a tensor may be in several shards or none of its elements
  /// in this one.
  std::vector<FlatSlice> slices(int rank) const;
  /// The places in the buffer that belong to no tensor, in order: {begin, end}.
  std::vector<std::pair<int64_t, int64_t>> gaps() const;

 private:
  std::vector<FlatTensor> tensors_;  // begin is filled in
  int64_t num_shards_ = 1;
  int64_t numel_ = 0;
  int64_t shard_numel_ = 0;
};

}  // namespace cohort::parallel
