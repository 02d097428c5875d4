// SPDX-License-Identifier: Apache-2.0
// Named tensors, and the shards of them that ranks hold.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cohort/parallel/sharding/sharding_engine.h"

namespace cohort::train {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The tensors of a checkpoint by part: "weights", "optimizer" ...
using Parts = std::map<std::string, NamedTensors>;

/// Elements [begin, end) of a tensor, counted row by row: of a sharded parameter, or of whatever
/// else a checkpoint holds. `tensor` has end - begin elements, in any shape, on any device.
using TensorShard = parallel::LocalShard;

/// Shards by part. A tensor may be in several shards, or be absent.
using ShardedParts = std::map<std::string, std::vector<TensorShard>>;

/// Each tensor as one shard that holds all of it.
std::vector<TensorShard> full_shards(const NamedTensors& tensors);
/// Rank's share of shards that `world_size` ranks hold alike: the rank-th of `world_size` cuts of
/// each, so that they write together what each of them has. Shares their memory.
/// Errors: c10::ValueError if a tensor is not contiguous.
ShardedParts share_of(const ShardedParts& parts, int rank, int world_size);
/// Optimizer state of sharded parameters as shards: "<parameter>.exp_avg" has the shape and
/// elements of the shard of <parameter>.
/// Errors: c10::ValueError if a tensor is of no parameter, or has another number of elements.
std::vector<TensorShard> shards_like(const std::vector<TensorShard>& parameters,
                                     const NamedTensors& state);

}  // namespace cohort::train
