// SPDX-License-Identifier: Apache-2.0
// Tensors as the bytes that checkpoints hold. For the checkpoints' own sources.
#pragma once
#include <string>
#include <vector>

#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/tensor_shard.h"

namespace cohort::train {

/// Errors: c10::ValueError for a type that files do not have.
DType dtype_of(const at::Tensor& tensor);
at::ScalarType scalar_type(DType dtype);
/// Whether it is a floating-point type: a load can convert these into each other.
bool is_floating(DType dtype);

/// Errors: c10::ValueError if the elements are not within the shape, or the tensor has others.
void check_shard(const TensorShard& shard);

/// The shards with contiguous tensors in the computer's memory: themselves where they are that.
std::vector<TensorShard> on_host(std::vector<TensorShard> shards);
/// Views of shards that are on the host.
std::vector<StoredShard> stored_shards(const std::vector<TensorShard>& shards);

/// Writes a rank's shards, a file for each part. If one cannot be written, the others go again.
/// Returns what the manifest must say.
/// Memory: of a part that is not on the host, a copy.
/// Errors: write_share's.
Manifest write_parts(const std::string& folder, const ShardedParts& parts, const ShareInfo& info);

}  // namespace cohort::train
