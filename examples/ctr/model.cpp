// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/model.h"

#include <torch/nn/functional/activation.h>
#include <torch/types.h>

#include "examples/ctr/linear_relu.h"

namespace ctr {

DeepFmImpl::DeepFmImpl(const DeepFmOptions& options) {
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
  const bool fused = x.is_cpu() && prefers_linear_relu();
  for (auto& layer : layers_)
    x = fused ? linear_relu(x, layer->weight, layer->bias) : at::relu(layer->forward(x));
  return output_->forward(x).squeeze(1) + wide_->forward(numbers_BN).squeeze(1) + pairs_B;
}

}  // namespace ctr
