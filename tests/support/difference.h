// SPDX-License-Identifier: Apache-2.0
// How far two models are from each other.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>
#include <vector>

namespace cohort::test {

/// The largest absolute difference between elements of parameters of the same name. NaN if one is
/// NaN: then every comparison with it fails, as one with std::max's result would not.
inline double difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  const at::NoGradGuard no_grad;
  const auto expected = b.named_parameters();
  std::vector<at::Tensor> largest;
  for (const auto& item : a.named_parameters())
    largest.push_back((item.value() - expected[item.key()]).abs().max().to(at::kDouble));
  return at::stack(largest).max().item<double>();
}

}  // namespace cohort::test
