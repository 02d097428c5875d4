// SPDX-License-Identifier: Apache-2.0
// Swaps a module's parameters for low-precision copies during one forward and its backward.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <memory>
#include <string>
#include <vector>

#include "cohort/parallel/mixed_precision_options.h"

namespace torch::autograd {
struct Node;
}

namespace cohort::parallel {

/// Swaps parameters for copies of another type before a forward, and back.
///
/// A libtorch module holds its parameters by value in typed members, so the copies go into the same
/// tensors: between `swap_in` and `swap_out`, a parameter's data are the copy's, and its gradient
/// passes a cast back to the master's type. Every consumer of a parameter has run when that cast
/// runs, so it swaps the master data back at once, and the gradient arrives at a float32 parameter
/// in float32. What no gradient reaches is swapped out when the backward ends.
///
/// Owner:   GradientEngine.
/// Threads: one. Local. One backward per forward; a retained graph cannot run a second time.
class LowPrecisionParameters {
 public:
  /// `parameters`: leaves, with their names; those not of floating point are left alone, and one that is listed twice
  /// is swapped once. `type`: a floating-point type.
  LowPrecisionParameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                         c10::ScalarType type);
  /// Swaps out.
  ~LowPrecisionParameters();
  LowPrecisionParameters(const LowPrecisionParameters&) = delete;
  LowPrecisionParameters& operator=(const LowPrecisionParameters&) = delete;

  /// Casts the master data. A parameter that is swapped in already stays as it is.
  /// Errors: c10::ValueError naming one that was written while it was swapped in: its next swap_out would
  ///         undo that.
  void swap_in();
  /// Puts back the master data of what is still swapped in.
  void swap_out();
  bool is_swapped_in() const;  ///< Some parameter is.

 private:
  struct Swap;
  struct Swaps;
  class CastBackward;
  c10::ScalarType type_;
  std::shared_ptr<Swaps> swaps_;
};

/// Returns `tensor` in `type` if it is of another floating-point type, else itself.
at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType type);
/// What comes into a model's forward, and what leaves it, in the types that `types` asks for.
at::Tensor cast_input(const MixedPrecision& types, const at::Tensor& input);
at::Tensor cast_output(const MixedPrecision& types, const at::Tensor& output);

/// Errors: c10::ValueError if a type is not a floating-point one.
void check_types(const MixedPrecision& types);
/// A line for each field, for ranks to compare.
std::string describe(const MixedPrecision& types);

}  // namespace cohort::parallel
