// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/delayed_parameters.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <utility>

namespace cohort::parallel {

DelayedParameters::DelayedParameters(std::vector<NamedTensor> parameters, size_t num_gradients,
                                     const comm::ProcessGroup& group)
    : parameters_(std::move(parameters)), num_gradients_(num_gradients), group_(group) {
  const at::Tensor& first = parameters_.front().tensor;
  for (const NamedTensor& each : parameters_) {
    TORCH_CHECK_VALUE(
        each.tensor.dtype() == first.dtype() && each.tensor.device() == first.device(),
        "delay_all_reduce_named_params: expected one type and device, got ", first.dtype(), " for ",
        parameters_.front().name, " and ", each.tensor.dtype(), " for ", each.name);
    TORCH_CHECK_VALUE(!each.sparse_gradient,
                      "delay_all_reduce_named_params: expected no sparse gradient, got ",
                      each.name);
  }
}

void DelayedParameters::arrived() {
  if (--awaited_ == 0) start();
}

void DelayedParameters::abandon() {
  awaited_ = 0;
  if (average_) wait_tensor(std::exchange(average_, {}));
}

void DelayedParameters::start() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> pieces;
  for (const NamedTensor& each : parameters_) pieces.push_back(each.tensor.grad().reshape({-1}));
  average_ = start_all_reduce(group_, at::cat(pieces).div_(group_.size()));
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
}

void DelayedParameters::finish() {
  const at::NoGradGuard no_grad;
  at::Tensor flat;
  group_.translate_errors("all_reduce of gradients",
                          [&] { flat = wait_tensor(std::exchange(average_, {})); });
  int64_t offset = 0;
  for (const NamedTensor& each : parameters_) {
    at::Tensor gradient = each.tensor.grad();
    gradient.copy_(flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
    offset += gradient.numel();
  }
}

}  // namespace cohort::parallel
