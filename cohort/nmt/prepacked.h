// SPDX-License-Identifier: Apache-2.0
// A matrix in the layout that the machine's products like best, for weights that many products
// share.
#pragma once
#include <ATen/core/Tensor.h>

namespace cohort::nmt {

/// W of y = x W^T (+ b), rearranged once: float32 for the project's own loops, bfloat16 for AMX's tiles, or by oneDNN
/// where the processor has AVX-512, all on a CPU; others stay as they are. For inference: no gradients.
///
/// Numerics: in float32 and bfloat16 a row of y is the same whatever other rows x has, which `at::linear` does not
/// promise. On a CPU the number of threads changes nothing either.
/// Threads: any number may multiply.
class Prepacked {
 public:
  Prepacked() = default;
  explicit Prepacked(const at::Tensor& weight);
  /// x [..., in] and, unless undefined, bias [out], in the weight's type; returns [..., out].
  /// Errors: c10::ValueError for other shapes, types and devices.
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& bias) const;

 private:
  void check(const at::Tensor& x, const at::Tensor& bias) const;
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias) const;
  at::Tensor product_of_blocks(const at::Tensor& x, const at::Tensor& bias) const;

  enum class Form { kGiven, kOneDnn, kBlocks, kTiles };
  Form form_ = Form::kGiven;
  at::Tensor weight_;  // kBlocks: [blocks of outputs, in, kPackedColumns], with 0 behind the last
  at::TensorOptions options_;  // of the weight that was given
  int64_t in_ = 0, out_ = 0;
};

}  // namespace cohort::nmt
