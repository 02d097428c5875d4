// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_backend.h"

#include <cstdlib>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/device/second_device.h"
#include "tests/support/ranks.h"

namespace cohort::test {
namespace second_backend_test {

using comm::ProcessGroup;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::gelu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 4));
};
TORCH_MODULE(Net);

// The parameters after two steps on the group's device, on the CPU.
std::vector<at::Tensor> trained(const ProcessGroup& group) {
  torch::manual_seed(3);
  Net net;
  net->to(group.device());
  parallel::DistributedDataParallel model(net, group);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 2; ++step) {
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

TEST(SecondBackendTest, DataParallelTrainingHasTheBitsOfTheCpu) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) register_second_backend();
  const auto ends =
      run_ranks(2,
                [](const ProcessGroup& group) {
                  EXPECT_EQ(group.device(), second_device());
                  at::Tensor sum = at::full({3}, group.rank() + 1, group.device());
                  group.all_reduce(sum);
                  EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, 3)));
                  const auto on_cpu = trained(group.subgroup({0, 1}, "cpu", {.backend = "gloo"}));
                  const auto on_device = trained(group);
                  ASSERT_EQ(on_device.size(), on_cpu.size());
                  for (size_t i = 0; i < on_cpu.size(); ++i)
                    EXPECT_TRUE(at::equal(on_device[i], on_cpu[i])) << i;
                },
                {.backend = "second"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

}  // namespace second_backend_test
}  // namespace cohort::test
