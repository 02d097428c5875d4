// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/adam.h"

#include <ATen/OpMathType.h>
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/optim/mapped_memory.h"

namespace cohort::optim {

std::vector<double> gradient_norms_squared(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<double> squares(parameters.size(), 0);
  std::set<const at::TensorImpl*> seen;
  std::map<c10::DeviceIndex, std::vector<size_t>> places;  // By device; the CPU's number is -1.
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].grad();
    const bool is_new = seen.insert(parameters[i].unsafeGetTensorImpl()).second;
    if (is_new && grad.defined() && grad.numel() > 0) places[grad.device().index()].push_back(i);
  }
  for (const auto& [device, indices] : places) {
    std::vector<at::Tensor> grads;
    for (const size_t i : indices) {
      const at::Tensor& grad = parameters[i].grad();
      grads.push_back(grad.is_sparse() ? grad.coalesce().values() : grad);
    }
    // In the gradients' own types unless one is a low one: another would cost a copy.
    std::optional<at::ScalarType> type;
    for (const at::Tensor& grad : grads)
      if (const auto wide = at::toOpMathType(grad.scalar_type()); wide != grad.scalar_type())
        type = wide;
    for (const at::Tensor& grad : grads)
      if (type && grad.scalar_type() == at::kDouble) type = at::kDouble;
    const at::Tensor here = at::stack(at::_foreach_norm(grads, 2, type)).to(at::kDouble).cpu();
    // Squaring in double keeps small tensors from being lost.
    for (size_t i = 0; i < indices.size(); ++i) {
      const double norm = here.const_data_ptr<double>()[i];
      squares[indices[i]] = norm * norm;
    }
  }
  return squares;
}

double gradient_norm_squared(const std::vector<at::Tensor>& parameters) {
  const auto is_trained = [](const at::Tensor& each) {
    return each.is_leaf() && each.requires_grad();
  };
  TORCH_CHECK_VALUE(parameters.empty() || std::ranges::any_of(parameters, is_trained),
                    "gradient_norm_squared: expected parameters, of which one at least requires a "
                    "gradient: pass parameters, not their gradients");
  const std::vector<double> squares = gradient_norms_squared(parameters);
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& model) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::set<const at::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.emplace_back(item.key(), item.value());
  }
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
  std::map<const at::TensorImpl*, std::string> seen;
  for (auto& [name, tensor] : parameters) {
    const auto [same, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), name);
    TORCH_CHECK_VALUE(is_new, "Adam: ", same->second, " and ", name,
                      " are one tensor: expected each once");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Adam: expected contiguous parameters; ", name,
                      " is not");
    TORCH_CHECK_VALUE(parameters_.empty() || tensor.device() == parameters_.front().device(),
                      "Adam: expected all parameters on one device, got some on ",
                      parameters_.empty() ? tensor.device() : parameters_.front().device(), ", ",
                      name, " on ", tensor.device());
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
  ++num_steps_;
  if (parameters.empty()) return;
  const auto number = at::TensorOptions(parameters.front().device()).dtype(at::kFloat);
  const std::vector<at::Tensor> steps(parameters.size(),
                                      at::full({}, static_cast<double>(num_steps_), number));
  // The kernel divides by grad_scale, a float32, and writes the scaled gradient back.
  std::optional<at::Tensor> scale;
  if (gradient_factor != 1 && parameters.front().scalar_type() == at::kDouble) {
    for (at::Tensor& grad : grads) grad.mul_(gradient_factor);
  } else if (gradient_factor != 1) {
    scale = at::full({}, 1 / gradient_factor, number);
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
