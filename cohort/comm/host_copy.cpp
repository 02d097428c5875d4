// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/host_copy.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace cohort::comm {

HostCopy::HostCopy(const at::Tensor& tensor) : host_(tensor.detach()) {
  const at::Device device = tensor.device();
  if (device.is_cpu()) return;
  host_ = at::empty_like(host_, host_.options().device(at::kCPU).pinned_memory(true));
  host_.copy_(tensor.detach(), /*non_blocking=*/true);
  arrived_.emplace(device.type());
  arrived_->record(c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
}

const at::Tensor& HostCopy::wait() {
  if (arrived_ && !arrived_->query()) arrived_->synchronize();
  arrived_.reset();
  return host_;
}

}  // namespace cohort::comm
