// SPDX-License-Identifier: Apache-2.0
// A layer of the deep network for processors on which MKL is slow.
#pragma once
#include <ATen/core/Tensor.h>

namespace ctr {

/// Whether linear_relu() is faster than at::linear() here: oneDNN uses AVX-512 on every processor
/// that has it, MKL on Intel's alone.
bool prefers_linear_relu();

/// relu(x W^T + b) and its gradients by oneDNN's products, with bias and relu in the first.
/// Shapes:   x [B, I], weight [O, I], bias [O], float32 on the CPU; returns [B, O].
/// Numerics: sums in another order than at::linear.
at::Tensor linear_relu(const at::Tensor& x_BI, const at::Tensor& weight_OI,
                       const at::Tensor& bias_O);

}  // namespace ctr
