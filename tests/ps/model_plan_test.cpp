// SPDX-License-Identifier: Apache-2.0
// A libtorch model's partition, and the process group that the same call gives instead.
#include "cohort/ps/module/model_plan.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "cohort/comm/rank_info.h"

#include "tests/support/free_port.h"
#include "tests/support/ranks.h"

namespace cohort::ps {
namespace model_plan_test {

struct Net : torch::nn::Module {
  Net() {
    register_module("first", first);
    register_module("frozen", frozen);
    register_module("last", last);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  torch::nn::Linear first{4, 8192}, frozen{4, 4}, last{4, 4};
};

TEST(ModelPlanTest, CutsWhatNeedsAGradientByItsName) {
  const Plan made = plan(Net(), {.pservers = "a:1,b:2"});
  std::vector<std::string> names;
  for (const Block& block : made.blocks) names.push_back(block.name);
  EXPECT_EQ(names, (std::vector<std::string>{"first.weight.block0", "first.weight.block1",
                                             "first.bias", "last.weight", "last.bias"}));
  EXPECT_EQ(made.parameters.front().shape, (std::vector<int64_t>{8192, 4}));
}

TEST(ModelPlanTest, ModeCollectiveGivesTheProcessGroup) {
  test::ranks(2, [](const comm::ProcessGroup& first) {
    at::Tensor port = torch::full({1}, first.rank() == 0 ? test::free_port() : 0, at::kLong);
    first.broadcast(port);
    const std::string endpoint = "127.0.0.1:" + std::to_string(port.item<int64_t>());
    const Plan made = plan(Net(), {.trainer_id = first.rank(),
                                   .trainer_endpoints = endpoint + ",127.0.0.1:2",
                                   .mode = PlanOptions::Mode::kCollective});
    comm::ProcessGroup group(
        comm::rank_info_from_endpoints(made.group->endpoints, made.group->rank));
    EXPECT_EQ(group.rank(), first.rank());
    EXPECT_EQ(group.size(), 2);
    EXPECT_EQ(group.all_reduce_sum(group.rank() + 1), 3);
    group.close();
  });
}

}  // namespace model_plan_test
}  // namespace cohort::ps
