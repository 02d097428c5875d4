// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/shared_tensor.h"

#include <ATen/ops/empty.h>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace cohort::comm {
namespace {

c10d::Backend& cpu_backend(const ProcessGroup& group) {
  return *group.c10d_group().getBackend(c10::DeviceType::CPU);
}

}  // namespace

bool shares_tensors(const ProcessGroup& group) {
  return cpu_backend(group).supportsTensorAlloc(-1);
}

bool averages_while_summing(const ProcessGroup& group) {
  const std::string name = cpu_backend(group).getBackendName();
  return name == "shm" || name == "hierarchical";
}

at::Tensor empty_shared(const ProcessGroup& group, int64_t numel,
                        const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(numel >= 0, "empty_shared: expected at least 0 elements, got ", numel);
  if (!options.device().is_cpu() || options.pinned_memory() || !shares_tensors(group))
    return at::empty({numel}, options);
  return cpu_backend(group).allocateTensor(numel, options);
}

}  // namespace cohort::comm
