// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/model.h"

#include <torch/nn/functional/activation.h>
#include <torch/types.h>

#include "examples/ctr/linear_relu.h"

namespace ctr {

DeepFmImpl::DeepFmImpl(const DeepFmOptions& options) : product_dtype_(options.product_dtype) {
  int64_t width = kNumbersWidth + options.slots * options.width;
  for (const int64_t hidden : options.hidden) {
    layers_.push_back(
        register_module("deep" + std::to_string(layers_.size()), torch::nn::Linear(width, hidden)));
    width = hidden;
  }
  output_ = register_module("output", torch::nn::Linear(width, 1));
  wide_ = register_module(
      "wide", torch::nn::Linear(torch::nn::LinearOptions(kNumbersWidth, 1).bias(false)));
}

at::Tensor DeepFmImpl::forward(const at::Tensor& numbers_BN, const at::Tensor& rows_BSD) {
  auto [x, pairs_B] = factorize(numbers_BN, rows_BSD);
  const at::ScalarType dtype = is_training() ? product_dtype_ : at::kFloat;
  const bool fused = dtype == at::kFloat && x.is_cpu() && prefers_linear_relu();
  x = x.to(dtype);
  for (auto& layer : layers_) {
    const at::Tensor weight = layer->weight.to(dtype), bias = layer->bias.to(dtype);
    x = fused ? linear_relu(x, weight, bias) : at::relu(at::linear(x, weight, bias));
  }
  return output_->forward(x.to(at::kFloat)).squeeze(1) + wide_->forward(numbers_BN).squeeze(1) +
         pairs_B;
}

}  // namespace ctr
