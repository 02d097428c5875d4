// SPDX-License-Identifier: Apache-2.0
// A matrix in the layout that the machine's products like best, for weights that many products
// share.
#pragma once
#include <ATen/core/Tensor.h>

namespace cohort::nmt {

/// W of y = x W^T (+ b), rearranged once, by oneDNN for float32 and bfloat16 on a CPU; others stay
/// as they are. For inference: no gradients.
///
/// Numerics: in float32 and bfloat16 a row of y is the same whatever other rows x has, on any one
/// number of threads, which `at::linear` does not promise.
/// Threads: any number may multiply.
class Prepacked {
 public:
  Prepacked() = default;
  explicit Prepacked(const at::Tensor& weight);
  /// x [..., in] and, unless undefined, bias [out], in the weight's type; returns [..., out].
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& bias) const;

 private:
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias) const;

  at::Tensor weight_;
  bool packed_ = false;
};

}  // namespace cohort::nmt
