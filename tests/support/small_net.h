// SPDX-License-Identifier: Apache-2.0
// A network of two layers, trained by every rank of a group on numbers of its own.
#pragma once
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <vector>

#include "cohort/parallel/distributed_data_parallel.h"

namespace cohort::test {

struct SmallNetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::gelu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 4));
};
TORCH_MODULE(SmallNet);

/// Returns the parameters after `steps` steps of DistributedDataParallel on the group's device, on
/// the CPU. Collective.
template <class Optimizer, class Options>
std::vector<at::Tensor> train_small_net(const comm::ProcessGroup& group, const Options& options,
                                        int steps) {
  torch::manual_seed(3);
  SmallNet net;
  net->to(group.device());
  parallel::DistributedDataParallel model(net, group);
  Optimizer optimizer(model.parameters(), options);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x = at::arange(30, at::kFloat).mul(1 + group.rank() + 0.3 * step).cos();
    optimizer.zero_grad();
    model(x.view({5, 6}).to(group.device())).pow(2).mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device(), group.device());
    parameters.push_back(parameter.detach().cpu());
  }
  return parameters;
}

}  // namespace cohort::test
