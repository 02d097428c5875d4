// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/tensor_shard.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <string_view>

namespace cohort::train {

std::vector<TensorShard> full_shards(const NamedTensors& tensors) {
  std::vector<TensorShard> shards;
  for (const auto& [name, tensor] : tensors)
    shards.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  return shards;
}

ShardedParts share_of(const ShardedParts& parts, int rank, int world_size) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "share_of: expected a rank below ", world_size,
                    ", got ", rank);
  ShardedParts shares;
  for (const auto& [part, shards] : parts) {
    auto& share = shares[part];
    for (const TensorShard& shard : shards) {
      TORCH_CHECK_VALUE(shard.tensor.is_contiguous(),
                        "share_of: expected contiguous tensors: ", shard.name);
      const int64_t count = shard.tensor.numel();
      const int64_t length = (count + world_size - 1) / world_size;
      const int64_t begin = std::min(rank * length, count);
      const int64_t end = std::min(begin + length, count);
      share.push_back({shard.name, shard.shape, shard.begin + begin, shard.begin + end,
                       shard.tensor.detach().view(-1).narrow(0, begin, end - begin)});
    }
  }
  return shares;
}

std::vector<TensorShard> shards_like(const std::vector<TensorShard>& parameters,
                                     const NamedTensors& state) {
  std::map<std::string_view, const TensorShard*> by_name;
  for (const TensorShard& parameter : parameters) by_name.emplace(parameter.name, &parameter);
  std::vector<TensorShard> shards;
  for (const auto& [name, tensor] : state) {
    const TensorShard* owner = nullptr;  // the longest name that fits: "a.b" before "a"
    for (size_t dot = name.rfind('.'); owner == nullptr && dot != name.npos && dot > 0;
         dot = name.rfind('.', dot - 1)) {
      const auto found = by_name.find(std::string_view(name).substr(0, dot));
      if (found != by_name.end()) owner = found->second;
    }
    TORCH_CHECK_VALUE(owner != nullptr, "shards_like: expected state of a parameter, got ", name);
    TORCH_CHECK_VALUE(tensor.numel() == owner->end - owner->begin, "shards_like: expected ",
                      owner->end - owner->begin, " elements of ", name, ", got ", tensor.numel());
    shards.push_back({name, owner->shape, owner->begin, owner->end, tensor});
  }
  return shards;
}

}  // namespace cohort::train
