// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/stored_tensor.h"

#include <array>
#include <torch/types.h>
#include <utility>

namespace cohort::train {

namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 10> kTypes = {{{DType::kF64, at::kDouble},
                                                                      {DType::kF32, at::kFloat},
                                                                      {DType::kF16, at::kHalf},
                                                                      {DType::kBF16, at::kBFloat16},
                                                                      {DType::kI64, at::kLong},
                                                                      {DType::kI32, at::kInt},
                                                                      {DType::kI16, at::kShort},
                                                                      {DType::kI8, at::kChar},
                                                                      {DType::kU8, at::kByte},
                                                                      {DType::kBool, at::kBool}}};

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  for (const auto& [dtype, type] : kTypes)
    if (type == tensor.scalar_type()) return dtype;
  TORCH_CHECK_VALUE(false, "checkpoint: tensors of type ", tensor.dtype(), " are not written");
}

at::ScalarType scalar_type(DType dtype) {
  for (const auto& [each, type] : kTypes)
    if (each == dtype) return type;
  TORCH_INTERNAL_ASSERT(false);
}

bool is_floating(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
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
