// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hook.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace cohort::parallel {
namespace {

// c10d's works hold a list of one tensor, ours one tensor.
at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  const auto list = value.toTensorVector();
  TORCH_CHECK(list.size() == 1, "a communication hook's future: expected one tensor, got ",
              list.size());
  return list[0];
}

}  // namespace

TensorFuture start_all_reduce(const comm::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  const TensorFuture future = group.c10d_group().allreduce(tensors)->getFuture();
  return then(future, [](const at::Tensor& sum) { return sum; });
}

TensorFuture then(const TensorFuture& future, std::function<at::Tensor(const at::Tensor&)> next) {
  return future->then(
      [next = std::move(next)](c10::ivalue::Future& done) -> c10::IValue {
        const at::NoGradGuard no_grad;
        return next(tensor_of(done.value()));
      },
      c10::TensorType::get());
}

TensorFuture ready(const at::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->markCompleted(tensor);
  return future;
}

at::Tensor wait_tensor(const TensorFuture& future) {
  future->waitAndThrow();
  return tensor_of(future->value());
}

}  // namespace cohort::parallel
