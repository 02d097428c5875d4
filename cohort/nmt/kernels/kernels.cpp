// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/kernels.h"

#include <ATen/core/Tensor.h>
#include <span>

namespace cohort::nmt {

extern const Kernels kCpuKernels;
extern const Kernels kAtenKernels;
extern const Kernels kCudaKernels;

namespace {
bool aten_everywhere = false;
}  // namespace

const Kernels& kernels_for(const at::Tensor& tensor) {
  if (cuda_launches_for(tensor.device().type()) != nullptr) return kCudaKernels;
  return tensor.device().is_cpu() && !aten_everywhere ? kCpuKernels : kAtenKernels;
}

void check_range(const char* what, const at::Tensor& numbers, int64_t least, int64_t most) {
  if (!numbers.is_cpu()) return;
  const at::Tensor dense = numbers.contiguous();
  for (const int64_t number :
       std::span(dense.const_data_ptr<int64_t>(), static_cast<size_t>(dense.numel()))) {
    TORCH_CHECK_VALUE(number >= least && number <= most, what, ": expected ", least, " to ", most,
                      ", got ", number);
  }
}

void use_aten_kernels(bool on) {
  aten_everywhere = on;
}

}  // namespace cohort::nmt
