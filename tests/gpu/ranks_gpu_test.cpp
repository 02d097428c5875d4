// SPDX-License-Identifier: Apache-2.0
// A rank on each card, over NCCL, beside the same ranks on the CPU over Gloo.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/comm/accelerator.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/support/ranks.h"

namespace cohort::test {
namespace ranks_gpu_test {

using comm::ProcessGroup;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::gelu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 4));
};
TORCH_MODULE(Net);

// The parameters after three steps on the group's device, on the CPU.
std::vector<at::Tensor> trained(const ProcessGroup& group) {
  torch::manual_seed(3);
  Net net;
  net->to(group.device());
  parallel::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
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

TEST(GpuRanksTest, DataParallelTrainingIsTheCpus) {
  const int cards = comm::init_cuda();
  const auto ends = run_ranks(
      cards,
      [](const ProcessGroup& group) {
        EXPECT_TRUE(group.device().is_cuda());
        const at::Tensor sum = at::full({3}, group.rank() + 1, group.device());
        group.all_reduce(sum);
        EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, group.size() * (group.size() + 1) / 2)));
        std::vector<int> all(static_cast<size_t>(group.size()));
        for (int rank = 0; rank < group.size(); ++rank) all[static_cast<size_t>(rank)] = rank;
        const auto on_cpu = trained(group.subgroup(all, "cpu", {.backend = "gloo"}));
        const auto on_card = trained(group);
        ASSERT_EQ(on_card.size(), on_cpu.size());
        // Values below 1, and a hundred roundings in three steps' sums of at most 16 terms.
        for (size_t i = 0; i < on_cpu.size(); ++i)
          EXPECT_LE((on_card[i] - on_cpu[i]).abs().max().item<double>(), 100 * 0x1p-24) << i;
      },
      {.backend = "nccl"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

}  // namespace ranks_gpu_test
}  // namespace cohort::test
