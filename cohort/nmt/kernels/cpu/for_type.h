// SPDX-License-Identifier: Apache-2.0
// From tensors to the loops of their type.
#pragma once
#include <ATen/core/Tensor.h>

#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

/// Calls body(table of loops, typed null pointer) for the dtype of what `operation` got.
/// Errors: c10::ValueError that begins with `operation` for other types, and for a tensor elsewhere
///         than on the CPU.
template <class Body>
void for_type(const char* operation, const at::Tensor& tensor, const Body& body) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), operation,
                    ": expected a tensor on the CPU, got one on ", tensor.device());
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return body(loops().f32, static_cast<float*>(nullptr));
    case at::kDouble:
      return body(loops().f64, static_cast<double*>(nullptr));
    case at::kBFloat16:
      return body(loops().bf16, static_cast<BFloat16Bits*>(nullptr));
    default:
      TORCH_CHECK_VALUE(false, operation, ": expected float32, float64 or bfloat16, got ",
                        tensor.dtype());
  }
}

template <class T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace cohort::nmt
