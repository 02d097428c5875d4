// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/adam.h"

#include <ATen/OpMathType.h>
#include <algorithm>
#include <cmath>
#include <optional>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/optim/mapped_memory.h"

namespace cohort::optim {

double gradient_norm_squared(const std::vector<at::Tensor>& parameters) {
  const auto is_trained = [](const at::Tensor& each) {
    return each.is_leaf() && each.requires_grad();
  };
  TORCH_CHECK_VALUE(parameters.empty() || std::ranges::any_of(parameters, is_trained),
                    "gradient_norm_squared: expected parameters, of which one at least requires a "
                    "gradient: pass parameters, not their gradients");
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined() || grad.numel() == 0) continue;
    // In the gradient's own type unless that is a low one: another would cost a copy. Squaring in
    // double keeps small tensors from being lost.
    const double norm = at::linalg_vector_norm(grad, 2, at::OptionalIntArrayRef{}, false,
                                               at::toOpMathType(grad.scalar_type()))
                            .item<double>();
    sum += norm * norm;
  }
  return sum;
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& model) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : model.named_parameters())
    parameters.emplace_back(item.key(), item.value());
  return parameters;
}

Adam::Adam(std::vector<std::pair<std::string, at::Tensor>> parameters, const AdamOptions& options)
    : options_(options) {
  std::optional<MappedMemory> disk;
  if (!options.state_folder.empty()) {
    int64_t bytes = 0;
    for (const auto& [name, tensor] : parameters) {
      TORCH_CHECK_VALUE(tensor.is_cpu(), "Adam: a state_folder expects parameters on the CPU; ",
                        name, " is on ", tensor.device());
      bytes += 2 * MappedMemory::bytes_of(tensor);
    }
    if (bytes > 0) disk.emplace(options.state_folder, bytes);
  }
  for (auto& [name, tensor] : parameters) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Adam: expected contiguous parameters; ", name,
                      " is not");
    names_.push_back(name);
    for (auto* moments : {&exp_avgs_, &exp_avg_sqs_}) {
      moments->push_back(disk ? disk->zeros_like(tensor)
                              : at::zeros_like(tensor, at::TensorOptions().requires_grad(false)));
    }
    parameters_.push_back(std::move(tensor));
  }
}

void Adam::step(double learning_rate, double gradient_factor) {
  const at::NoGradGuard no_grad;
  ++num_steps_;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_[i].grad();
    if (!grad.defined()) continue;
    // The fused kernel walks raw memory: another layout would be updated wrongly without an error.
    TORCH_CHECK_VALUE(grad.is_contiguous() && grad.sizes() == parameters_[i].sizes(),
                      "Adam: the gradient of ", names_[i], " has shape ", grad.sizes(), " strides ",
                      grad.strides(), ": expected contiguous ", parameters_[i].sizes());
    parameters.push_back(parameters_[i]);
    grads.push_back(grad);
    exp_avgs.push_back(exp_avgs_[i]);
    exp_avg_sqs.push_back(exp_avg_sqs_[i]);
  }
  if (parameters.empty()) return;
  const std::vector<at::Tensor> steps(parameters.size(),
                                      at::full({}, static_cast<double>(num_steps_), at::kFloat));
  // The kernel divides by grad_scale, a float32, and writes the scaled gradient back.
  std::optional<at::Tensor> scale;
  if (gradient_factor != 1 && parameters.front().scalar_type() == at::kDouble) {
    for (at::Tensor& grad : grads) grad.mul_(gradient_factor);
  } else if (gradient_factor != 1) {
    scale = at::full({}, 1 / gradient_factor, at::kFloat);
  }
  at::_fused_adam_(parameters, grads, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps,
                   learning_rate, options_.beta1, options_.beta2, /*weight_decay=*/0, options_.eps,
                   /*amsgrad=*/false,
                   /*maximize=*/false, scale, /*found_inf=*/std::nullopt);
  // The fused call returns nothing, so autograd does not count it as a change. Code that caches
  // something derived from a parameter checks its version.
  for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
}

void Adam::zero_grad() {
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
}

std::vector<std::pair<std::string, at::Tensor>> Adam::state() const {
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (size_t i = 0; i < names_.size(); ++i) {
    state.emplace_back(names_[i] + ".exp_avg", exp_avgs_[i]);
    state.emplace_back(names_[i] + ".exp_avg_sq", exp_avg_sqs_[i]);
  }
  return state;
}

}  // namespace cohort::optim
