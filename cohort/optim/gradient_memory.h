// SPDX-License-Identifier: Apache-2.0
// Memory where a parameter's gradient is wanted, such as a bucket that travels: an operation's
// backward writes it there, where it would else be copied to.
#pragma once
#include <ATen/core/Tensor.h>
#include <functional>

namespace cohort::optim {

/// Offers memory for gradients of parameters, while it lives.
///
/// Owner:   what reduces gradients. The parameters live at least as long.
/// Threads: any.
class GradientMemory {
 public:
  GradientMemory() = default;
  ~GradientMemory();
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;

  /// `memory` returns a new contiguous tensor of the parameter's shape and type, no view, over
  /// memory in which nobody's values are while the parameter has no gradient; undefined: none
  /// at present. Called within a backward. In place of an earlier offer.
  void offer(const at::Tensor& parameter, std::function<at::Tensor()> memory);
  void withdraw();  ///< All offers.
};

/// For an operation's backward: returns what was offered for the leaf `parameter`, to be filled and
/// returned as its whole gradient. Undefined if there is no offer for `shape` and `type`, if the
/// parameter has a gradient already, if what was taken before is still in use, or if this is no
/// backward() that ends in all parameters, as torch::autograd::grad: its results are the caller's.
///
/// `parameter`: compared with those of offers, and not read.
at::Tensor take_gradient_memory(const at::TensorImpl* parameter, at::IntArrayRef shape,
                                at::ScalarType type);

}  // namespace cohort::optim
