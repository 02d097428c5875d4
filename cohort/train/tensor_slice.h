// Named tensors, and parts of them that ranks hold.
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

/// Elements [begin, end) of a tensor, counted row by row: of a parameter that ranks share out, or
/// of whatever else a checkpoint holds. `tensor` has end - begin elements, in any shape, on any
/// device.
using TensorSlice = parallel::ParameterSlice;

/// Slices by part. A tensor may be in several slices, or be absent.
using SlicedParts = std::map<std::string, std::vector<TensorSlice>>;

/// Each tensor as one slice that is all of it.
std::vector<TensorSlice> whole_slices(const NamedTensors& tensors);
/// Rank's share of slices that `world_size` ranks hold alike: the rank-th of `world_size` cuts of
/// each, so that they write together what each of them has. Shares their memory. Errors:
/// c10::ValueError if a tensor is not contiguous.
SlicedParts share_of(const SlicedParts& parts, int rank, int world_size);
/// Optimizer state of sliced parameters as slices: "<parameter>.exp_avg" has the shape and elements
/// of the slice of <parameter>.
/// Errors: c10::ValueError if a tensor is of no parameter, or has another number of elements.
std::vector<TensorSlice> slices_like(const std::vector<TensorSlice>& parameters,
                                     const NamedTensors& state);

}  // namespace cohort::train
