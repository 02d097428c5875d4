// SPDX-License-Identifier: Apache-2.0
// A sharded optimizer against one that every rank has whole.
#include "cohort/parallel/zero_redundancy_optimizer.h"

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "cohort/optim/adam.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/difference.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace zero_redundancy_optimizer_test {

using comm::ProcessGroup;
using parallel::LocalShard;
using parallel::ZeroRedundancyOptimizer;
using test::Branches;
using test::difference;
using Ddp = parallel::DistributedDataParallel<Branches>;

std::vector<std::pair<std::string, at::Tensor>> named(const std::vector<LocalShard>& shards) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const LocalShard& shard : shards) result.emplace_back(shard.name, shard.tensor);
  return result;
}

optim::Adam adam_of(const std::vector<LocalShard>& shards) {
  return optim::Adam(named(shards));
}

// Both models see all ranks' batches; steps of 1e-2.
void expect_plain_adam(const ProcessGroup& group) {
  Branches plain;
  Branches shared;
  plain->shared->bias.set_requires_grad(false);
  shared->shared->bias.set_requires_grad(false);
  std::vector<std::pair<std::string, at::Tensor>> trained = optim::named_parameters(*plain);
  std::erase_if(trained, [](const auto& each) { return !each.second.requires_grad(); });
  optim::Adam adam(trained);
  Ddp ddp(shared, group, {.gradient_as_bucket_view = true});
  ZeroRedundancyOptimizer<optim::Adam> zero(optim::named_parameters(*shared), group, adam_of);
  int64_t held = 0;
  for (const LocalShard& shard : zero.local_shards()) held += shard.tensor.numel();
  int64_t blocks = 0;
  for (const auto& each : trained) blocks += (each.second.numel() + 15) / 16;
  EXPECT_LE(held, 16 * ((blocks + group.size() - 1) / group.size()));
  for (int step = 0; step < 10; ++step) {
    for (int rank = 0; rank < group.size(); ++rank)
      (test::loss_of(plain->forward(test::batch_of(rank, step))) / group.size()).backward();
    const double norm = std::sqrt(optim::gradient_norm_squared(adam.parameters()));
    const double factor = norm > 0.5 ? 0.5 / norm : 1;
    adam.step(1e-2, factor);
    adam.zero_grad();
    test::loss_of(ddp(test::batch_of(group.rank(), step))).backward();
    zero.step(1e-2, factor);
    zero.zero_grad();
    for (const auto& parameter : shared->parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
  // float64: 10 steps, a gradient's few eps are divided by its own size.
  EXPECT_LE(difference(*shared, *plain), 1e-10);
  EXPECT_GT(difference(*shared, *Branches()), 1e-3);
}

TEST(ZeroRedundancyOptimizerTest, TwoRanksTrainAsPlainAdam) {
  test::ranks(2, expect_plain_adam);
}

TEST(ZeroRedundancyOptimizerTest, ThreeRanksTrainAsPlainAdam) {
  test::ranks(3, expect_plain_adam);
}

TEST(ZeroRedundancyOptimizerTest, FourRanksTrainAsPlainAdam) {
  test::ranks(4, expect_plain_adam);
}

TEST(ZeroRedundancyOptimizerTest, OneRankTrainsAsPlainAdam) {
  ProcessGroup alone(comm::RankInfo{});
  expect_plain_adam(alone);
}

struct MatricesImpl : torch::nn::Module {
  explicit MatricesImpl(int64_t width) {
    a = register_parameter("a", at::linspace(-1, 1, width * width).view({width, width}));
    b = register_parameter("b", at::linspace(1, -0.5, width * width).view({width, width}));
    c = register_parameter("c", at::linspace(-0.3, 0.2, width));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(at::tanh(at::matmul(x, a)), b) + c; }
  at::Tensor a, b, c;
};
TORCH_MODULE(Matrices);

// Largest difference of float32 parameters between optim::Adam on whole parameters and on shards.
double float32_difference(const ProcessGroup& group, int64_t width) {
  using Parallel = parallel::DistributedDataParallel<Matrices>;
  Matrices whole(width);
  Matrices shared(width);
  Parallel whole_ddp(whole, group);
  Parallel shared_ddp(shared, group);
  optim::Adam adam(optim::named_parameters(*whole));
  ZeroRedundancyOptimizer<optim::Adam> zero(optim::named_parameters(*shared), group, adam_of);
  for (int step = 0; step < 8; ++step) {
    const at::Tensor x =
        at::arange(4 * width).mul(1 + group.rank() + 0.37 * step).cos().view({4, width});
    test::loss_of(whole_ddp(x)).backward();
    test::loss_of(shared_ddp(x)).backward();
    adam.step(1e-3);
    zero.step(1e-3);
    adam.zero_grad();
    zero.zero_grad();
  }
  return difference(*shared, *whole);
}

TEST(ZeroRedundancyOptimizerTest, InFloat32EveryBitIsPlainDdps) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const int64_t width : {30, 32}) EXPECT_EQ(float32_difference(group, width), 0);
  });
}

TEST(ZeroRedundancyOptimizerTest, LibtorchsOptimizersWithGroupsAndClippingOfTheirOwn) {
  test::ranks(2, [](const ProcessGroup& group) {
    using torch::optim::AdamW;
    using torch::optim::AdamWOptions;
    // Weights decay, biases do not.
    const auto make = [](const std::vector<std::pair<std::string, at::Tensor>>& all) {
      std::vector<at::Tensor> weights;
      std::vector<at::Tensor> biases;
      for (const auto& [name, tensor] : all)
        (name.ends_with("bias") ? biases : weights).push_back(tensor);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(weights,
                          std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.1)));
      groups.emplace_back(biases,
                          std::make_unique<AdamWOptions>(AdamWOptions(3e-2).weight_decay(0)));
      return AdamW(groups);
    };
    Branches plain;
    Branches shared;
    Ddp plain_ddp(plain, group);
    Ddp shared_ddp(shared, group);
    AdamW whole = make(optim::named_parameters(*plain));
    ZeroRedundancyOptimizer<AdamW> zero(
        optim::named_parameters(*shared), group,
        [&](const std::vector<LocalShard>& shards) { return make(named(shards)); });
    for (int step = 0; step < 5; ++step) {
      for (Ddp* ddp : {&plain_ddp, &shared_ddp}) {
        test::loss_of((*ddp)(test::batch_of(group.rank(), step))).backward();
        EXPECT_GT(torch::nn::utils::clip_grad_norm_((*ddp)->parameters(), 0.5), 0.5);
      }
      whole.step();
      whole.zero_grad();
      zero.step();
      zero.zero_grad();
    }
    EXPECT_LE(difference(*shared, *plain), 1e-14);
    EXPECT_GT(difference(*shared, *Branches()), 1e-3);
  });
}

TEST(ZeroRedundancyOptimizerTest, AParameterWithoutAGradientKeepsItsValue) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.find_unused_parameters = true});
    ZeroRedundancyOptimizer<optim::Adam> zero(optim::named_parameters(*model), group, adam_of);
    const at::Tensor unused = model->extra->weight.detach().clone();
    const at::Tensor used = model->first->weight.detach().clone();
    const auto version = model->first->weight._version();
    test::loss_of(ddp(test::batch_of(group.rank()), false)).backward();
    zero.step(1e-2);
    EXPECT_TRUE(model->extra->weight.equal(unused));
    EXPECT_FALSE(model->first->weight.equal(used));
    EXPECT_GT(model->first->weight._version(), version) << "who keeps copies must see it";
  });
}

TEST(ZeroRedundancyOptimizerTest, BadParametersAreRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    const at::Tensor w = at::ones({3}).requires_grad_(true);
    const at::Tensor v = at::ones({2 + group.rank()}).requires_grad_(true);
    const auto make = [&](const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
      ZeroRedundancyOptimizer<optim::Adam> zero(parameters, group, adam_of);
    };
    test::expect_error<c10::ValueError>([&] { make({{"w", w}, {"w", v}}); }, "the name w");
    test::expect_error<c10::ValueError>(
        [&] {
          make({{"w", at::ones({2})}});
        },
        "requires a gradient");
    test::expect_error<c10::ValueError>([&] { make({{"v", v}}); }, "rank 1 has v [3]");
  });
}

}  // namespace zero_redundancy_optimizer_test
}  // namespace cohort
