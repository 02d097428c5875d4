// SPDX-License-Identifier: Apache-2.0
// The types that a wrapped model computes and communicates in: an option of DistributedDataParallel
// and of FullyShardedDataParallel.
#pragma once
#include <c10/core/ScalarType.h>
#include <optional>

namespace cohort::parallel {

/// Floating-point types, the same on all ranks, of a forward and backward whose parameters stay in
/// their own type (float32) for the optimizer; unset ones stay as they are. Names and meanings are
/// those of PyTorch's MixedPrecisionPolicy and of FSDP's MixedPrecision.
struct MixedPrecision {
  std::optional<c10::ScalarType> param_dtype;  ///< Parameters during forward and backward.
  /// Gradients while they are summed over ranks, dense ones only; they are divided before. Unset:
  /// the parameters' own type.
  std::optional<c10::ScalarType> reduce_dtype;
  std::optional<c10::ScalarType>
      buffer_dtype;  ///< Floating-point buffers, for good, from construction on.
  /// Floating-point tensors that the model's forward returns.
  std::optional<c10::ScalarType> output_dtype;
  /// Floating-point inputs come to the forward in param_dtype, if that is set.
  bool cast_forward_inputs = true;
};

}  // namespace cohort::parallel
