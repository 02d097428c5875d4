// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/kernels.h"

#include <ATen/core/Tensor.h>

namespace cohort::nmt {

extern const Kernels kCpuKernels;
extern const Kernels kAtenKernels;

namespace {
bool aten_everywhere = false;
}  // namespace

const Kernels& kernels_for(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && !aten_everywhere ? kCpuKernels : kAtenKernels;
}

void use_aten_kernels(bool on) {
  aten_everywhere = on;
}

}  // namespace cohort::nmt
