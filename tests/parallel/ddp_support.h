// SPDX-License-Identifier: Apache-2.0
// Small models, batches that every rank can make for any rank, and the one-process gradient to
// compare with.
#pragma once
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/distributed_data_parallel.h"

namespace cohort::test {

// float64: sums of fewer than 100 terms in another order: 100 eps of the largest element.
constexpr double kGradientBound = 2.2e-14;

/// Two layers, a third one that takes part on request, a layer applied twice, and a buffer.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    first = register_module("first", torch::nn::Linear(4, 6));
    shared = register_module("shared", torch::nn::Linear(6, 6));
    extra = register_module("extra", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 2));
    calls = register_buffer("calls", at::zeros({1}));
    to(at::kDouble);
    torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(phase += 1).sin().view(parameter.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x, bool use_extra = true) {
    const auto h = shared(at::tanh(shared(at::tanh(first(x)))));
    return last(use_extra ? h + at::tanh(extra(h)) : h);
  }
  torch::nn::Linear first{nullptr}, shared{nullptr}, extra{nullptr}, last{nullptr};
  at::Tensor calls;
};
TORCH_MODULE(Branches);
using Ddp = parallel::DistributedDataParallel<Branches>;

inline at::Tensor batch_of(int rank, int step = 0) {
  return at::arange(12, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({3, 4});
}

inline at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

/// The gradients of every parameter of the mean over ranks of `loss(model, rank)`.
template <class Loss>
std::vector<at::Tensor> expected_gradients(Branches& model, int world_size, Loss loss) {
  model->zero_grad();
  for (int rank = 0; rank < world_size; ++rank) (loss(model, rank) / world_size).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

inline void expect_near(const at::Tensor& got, const at::Tensor& expected, const std::string& what,
                        double bound = kGradientBound) {
  ASSERT_EQ(got.defined(), expected.defined()) << what;
  if (!got.defined()) return;
  const double scale = expected.abs().max().item<double>();
  EXPECT_LE((got - expected).abs().max().item<double>(), bound * std::max(scale, 1e-30)) << what;
}

inline void expect_gradients(Branches& model, const std::vector<at::Tensor>& expected) {
  size_t i = 0;
  for (const auto& item : model->named_parameters())
    expect_near(item.value().grad(), expected[i++], item.key());
}

/// Expects `call` to throw an error of type Error whose text holds `part`.
template <class Error, class Call>
void expect_error(Call call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

/// Plain gradient descent, so that a test sees every bit of the gradients.
inline void descend(torch::nn::Module& model, double rate) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    if (parameter.grad().defined()) parameter.add_(parameter.grad(), -rate);
    parameter.mutable_grad().reset();
  }
}

}  // namespace cohort::test
