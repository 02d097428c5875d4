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

void check_slice(const TensorSlice& slice) {
  const auto count = num_elements(slice.shape);
  TORCH_CHECK_VALUE(count && 0 <= slice.begin && slice.begin <= slice.end && slice.end <= *count &&
                        slice.tensor.numel() == slice.end - slice.begin,
                    "checkpoint: expected a slice's elements within its tensor: ", slice.name,
                    ", shape ", to_string(slice.shape), ", elements ", slice.begin, " to ",
                    slice.end, ", a tensor of ", slice.tensor.numel());
}

std::vector<TensorSlice> on_host(std::vector<TensorSlice> slices) {
  for (TensorSlice& slice : slices) slice.tensor = slice.tensor.detach().cpu().contiguous();
  return slices;
}

std::vector<StoredSlice> stored_slices(const std::vector<TensorSlice>& slices) {
  std::vector<StoredSlice> stored;
  for (const TensorSlice& slice : slices) {
    check_slice(slice);
    stored.push_back(
        {.name = slice.name,
         .dtype = dtype_of(slice.tensor),
         .shape = slice.shape,
         .range = {slice.begin, slice.end},
         .bytes = {static_cast<const std::byte*>(slice.tensor.data_ptr()), slice.tensor.nbytes()}});
  }
  return stored;
}

Manifest write_parts(const std::string& folder, const SlicedParts& parts, const ShareInfo& info) {
  Manifest share{.update = info.update};
  try {
    for (const auto& [part, slices] : parts) {
      const std::vector<TensorSlice> host = on_host(slices);
      share.add(write_share(folder, part, stored_slices(host), info), folder);
    }
  } catch (...) {
    discard_share(folder, share);
    throw;
  }
  return share;
}

}  // namespace cohort::train
