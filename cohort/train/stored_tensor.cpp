#include "cohort/train/stored_tensor.h"

#include <torch/types.h>

namespace cohort::train {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kShort:
      return DType::kI16;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    default:
      TORCH_CHECK_VALUE(false, "checkpoint: tensors of type ", tensor.dtype(), " are not written");
  }
}

void check_shard(const TensorShard& shard) {
  const auto count = num_elements(shard.shape);
  TORCH_CHECK_VALUE(count && 0 <= shard.begin && shard.begin <= shard.end && shard.end <= *count &&
                        shard.tensor.numel() == shard.end - shard.begin,
                    "checkpoint: expected a shard's elements within its tensor: ", shard.name,
                    ", shape ", to_string(shard.shape), ", elements ", shard.begin, " to ",
                    shard.end, ", a tensor of ", shard.tensor.numel());
}

std::vector<TensorShard> on_host(std::vector<TensorShard> shards) {
  for (TensorShard& shard : shards) shard.tensor = shard.tensor.detach().cpu().contiguous();
  return shards;
}

std::vector<StoredShard> stored_shards(const std::vector<TensorShard>& shards) {
  std::vector<StoredShard> stored;
  for (const TensorShard& shard : shards) {
    check_shard(shard);
    stored.push_back(
        {.name = shard.name,
         .dtype = dtype_of(shard.tensor),
         .shape = shard.shape,
         .range = {shard.begin, shard.end},
         .bytes = {static_cast<const std::byte*>(shard.tensor.data_ptr()), shard.tensor.nbytes()}});
  }
  return stored;
}

Manifest write_parts(const std::string& folder, const ShardedParts& parts, const ShareInfo& info) {
  Manifest share{.update = info.update};
  try {
    for (const auto& [part, shards] : parts) {
      const std::vector<TensorShard> host = on_host(shards);
      share.add(write_share(folder, part, stored_shards(host), info), folder);
    }
  } catch (...) {
    discard_share(folder, share);
    throw;
  }
  return share;
}

}  // namespace cohort::train
