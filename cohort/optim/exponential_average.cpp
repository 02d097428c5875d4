// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/exponential_average.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <set>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/types.h>

namespace cohort::optim {

ExponentialAverage::ExponentialAverage(std::vector<at::Tensor> parameters, double alpha)
    : parameters_(std::move(parameters)), alpha_(alpha) {
  TORCH_CHECK_VALUE(alpha > 0 && alpha < 1,
                    "exponential average: expected a weight in (0, 1), got ", alpha);
  std::set<const at::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters_)
    TORCH_CHECK_VALUE(seen.insert(parameter.unsafeGetTensorImpl()).second,
                      "exponential average: a tensor is listed twice: expected each once, as the "
                      "wrapped model's parameters() lists them");
  for (const at::Tensor& parameter : parameters_) averages_.push_back(parameter.detach().clone());
}

void ExponentialAverage::update() {
  const at::NoGradGuard no_grad;
  const double rate = std::max(alpha_, 9.0 / (static_cast<double>(++num_updates_) + 9.0));
  for (size_t i = 0; i < parameters_.size(); ++i) averages_[i].lerp_(parameters_[i], rate);
}

void ExponentialAverage::begin_anew() {
  for (size_t i = 0; i < parameters_.size(); ++i) averages_[i].copy_(parameters_[i].detach());
}

void ExponentialAverage::swap() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor kept = parameters_[i].detach().clone();
    parameters_[i].copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

}  // namespace cohort::optim
