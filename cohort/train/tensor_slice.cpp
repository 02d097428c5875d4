#include "cohort/train/tensor_slice.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <string_view>

namespace cohort::train {

std::vector<TensorSlice> whole_slices(const NamedTensors& tensors) {
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : tensors)
    slices.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  return slices;
}

SlicedParts share_of(const SlicedParts& parts, int rank, int world_size) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "share_of: expected a rank below ", world_size,
                    ", got ", rank);
  SlicedParts shares;
  for (const auto& [part, slices] : parts) {
    auto& share = shares[part];
    for (const TensorSlice& slice : slices) {
      TORCH_CHECK_VALUE(slice.tensor.is_contiguous(),
                        "share_of: expected contiguous tensors: ", slice.name);
      const int64_t count = slice.tensor.numel();
      const int64_t length = (count + world_size - 1) / world_size;
      const int64_t begin = std::min(rank * length, count);
      const int64_t end = std::min(begin + length, count);
      share.push_back({slice.name, slice.shape, slice.begin + begin, slice.begin + end,
                       slice.tensor.detach().view(-1).narrow(0, begin, end - begin)});
    }
  }
  return shares;
}

std::vector<TensorSlice> slices_like(const std::vector<TensorSlice>& parameters,
                                     const NamedTensors& state) {
  std::map<std::string_view, const TensorSlice*> by_name;
  for (const TensorSlice& parameter : parameters) by_name.emplace(parameter.name, &parameter);
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : state) {
    const TensorSlice* owner = nullptr;  // the longest name that fits: "a.b" before "a"
    for (size_t dot = name.rfind('.'); owner == nullptr && dot != name.npos && dot > 0;
         dot = name.rfind('.', dot - 1)) {
      const auto found = by_name.find(std::string_view(name).substr(0, dot));
      if (found != by_name.end()) owner = found->second;
    }
    TORCH_CHECK_VALUE(owner != nullptr, "slices_like: expected state of a parameter, got ", name);
    TORCH_CHECK_VALUE(tensor.numel() == owner->end - owner->begin, "slices_like: expected ",
                      owner->end - owner->begin, " elements of ", name, ", got ", tensor.numel());
    slices.push_back({name, owner->shape, owner->begin, owner->end, tensor});
  }
  return slices;
}

}  // namespace cohort::train
