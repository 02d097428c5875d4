// SPDX-License-Identifier: Apache-2.0
// Loss scaling: PyTorch's rules, and that all ranks agree.
#include "cohort/parallel/grad_scaler.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <torch/nn/modules/linear.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace grad_scaler_test {

using comm::ProcessGroup;
using parallel::GradScaler;
constexpr float kInf = std::numeric_limits<float>::infinity();

// One step of a single parameter whose gradient is `gradient`; whether it counts.
bool step(GradScaler& scaler, float gradient) {
  const at::Tensor w = at::ones({3}).requires_grad_(true);
  w.mutable_grad() = at::full({3}, gradient);
  const bool good = scaler.unscale({w});
  scaler.update();
  return good;
}

TEST(GradScalerTest, TheScaleGrowsAfterGoodStepsInARowAndShrinksAfterABadOne) {
  ProcessGroup alone(comm::RankInfo{});
  GradScaler scaler(alone, {.growth_interval = 3});
  EXPECT_EQ(scaler.scale(), 65536);
  std::vector<double> scales;
  for (const float gradient : {1.F, 1.F, kInf, 1.F, 1.F, 1.F, 1.F, std::nanf(""), 1.F}) {
    EXPECT_EQ(step(scaler, gradient), std::isfinite(gradient));
    scales.push_back(scaler.scale() / 65536);
  }
  EXPECT_EQ(scales, (std::vector<double>{1, 1, 0.5, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5}));
}

TEST(GradScalerTest, ItDividesGradientsAndGoesOnFromItsState) {
  ProcessGroup alone(comm::RankInfo{});
  GradScaler scaler(alone, {.init_scale = 1024, .growth_interval = 2});
  const at::Tensor w = at::ones({3}).requires_grad_(true);
  const at::Tensor without = at::ones({3}).requires_grad_(true);
  scaler.scale((w * 3).sum()).backward();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 3072.F)));
  EXPECT_TRUE(scaler.unscale({w, without, w})) << "each tensor once";
  EXPECT_TRUE(w.grad().equal(at::full({3}, 3.F)));
  scaler.update();
  GradScaler next(alone, {.growth_interval = 2});
  const auto saved = scaler.state();
  for (size_t i = 0; i < saved.size(); ++i) next.state()[i].second.copy_(saved[i].second);
  EXPECT_EQ(next.scale(), 1024);
  EXPECT_TRUE(step(next, 1));
  EXPECT_EQ(next.scale(), 2048) << "the second good step in a row";
}

TEST(GradScalerTest, ItNeverGrowsToInfinity) {
  ProcessGroup alone(comm::RankInfo{});
  GradScaler scaler(alone, {.init_scale = 3e38, .growth_interval = 1});
  EXPECT_TRUE(step(scaler, 0));
  EXPECT_TRUE(std::isfinite(scaler.scale()));
}

TEST(GradScalerTest, WrongUseIsRefused) {
  ProcessGroup alone(comm::RankInfo{});
  GradScaler scaler(alone);
  const at::Tensor w = at::ones({3}).requires_grad_(true);
  test::expect_error<c10::ValueError>([&] { scaler.update(); }, "expects unscale before");
  EXPECT_TRUE(scaler.unscale({w}));
  test::expect_error<c10::ValueError>([&] { scaler.unscale({w}); }, "since the last update");
  scaler.update();
  const at::Tensor low = at::ones({3}, at::kHalf).requires_grad_(true);
  low.mutable_grad() = at::ones({3}, at::kHalf);
  test::expect_error<c10::ValueError>([&] { scaler.unscale({low}); }, "float16");
  test::expect_error<c10::ValueError>([&] { GradScaler(alone, {.init_scale = 0}); }, "init_scale");
  test::expect_error<c10::ValueError>([&] { GradScaler(alone, {.growth_factor = 1}); },
                                      "growth_factor");
  test::expect_error<c10::ValueError>([&] { GradScaler(alone, {.backoff_factor = 1}); },
                                      "backoff_factor");
  test::expect_error<c10::ValueError>([&] { GradScaler(alone, {.growth_interval = 0}); },
                                      "growth_interval");
}

TEST(GradScalerTest, OneRanksOverflowIsEverybodys) {
  test::ranks(2, [](const ProcessGroup& group) {
    GradScaler scaler(group);
    EXPECT_FALSE(step(scaler, group.rank() == 1 ? kInf : 1.F));
    EXPECT_EQ(scaler.scale(), 32768);
    EXPECT_TRUE(step(scaler, 1));
    const at::Tensor w = at::ones({3}).requires_grad_(true);
    if (group.rank() == 1) w.mutable_grad() = at::full({3}, kInf);
    std::vector<at::Tensor> held;
    if (group.rank() == 1) held.push_back(w);
    EXPECT_FALSE(scaler.unscale(held)) << "a rank that holds nothing takes part";
  });
}

struct HeadImpl : torch::nn::Module {
  HeadImpl() {
    a = register_parameter("a", at::linspace(-1, 1, 16).view({4, 4}));
    b = register_parameter("b", at::linspace(0.5, -0.5, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, a) * b; }
  at::Tensor a, b;
};
TORCH_MODULE(Head);

// Float16 arithmetic on float32 masters: in step 1 rank 1's loss overflows; the others count.
template <class Model>
void train(const ProcessGroup& group, Model& model,
           const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  optim::Adam adam(parameters);
  std::vector<at::Tensor> tensors;
  for (const auto& each : parameters) tensors.push_back(each.second);
  GradScaler scaler(group, {.init_scale = 256, .growth_interval = 2});
  std::vector<double> scales;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor x = at::arange(8).add(1 + group.rank()).mul(0.1 + 0.03 * step).view({2, 4});
    const at::Tensor y = model(x);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    at::Tensor loss = y.pow(2).sum();
    if (step == 1 && group.rank() == 1) loss = loss * 1e6;  // beyond 65504 in the backward
    scaler.scale(loss).backward();
    const bool good = scaler.unscale(tensors);
    EXPECT_EQ(good, step != 1);
    if (good) adam.step(1e-2);
    scaler.update();
    scales.push_back(scaler.scale());
    adam.zero_grad();
  }
  EXPECT_EQ(adam.num_steps(), 4);
  EXPECT_EQ(scales, (std::vector<double>{256, 128, 128, 256, 256}));
}

TEST(GradScalerTest, WithDistributedDataParallelAndShardedModelsAStepThatOverflowsIsLeftOut) {
  test::ranks(2, [](const ProcessGroup& group) {
    const parallel::MixedPrecision types{.param_dtype = at::kHalf, .output_dtype = at::kFloat};
    Head whole;
    parallel::DistributedDataParallel<Head> ddp(whole, group, {.mixed_precision = types});
    train(group, ddp, optim::named_parameters(*whole));
    for (const auto shard :
         {parallel::Shard::kOptimizer, parallel::Shard::kGradients, parallel::Shard::kParameters}) {
      Head head;
      parallel::FullyShardedDataParallel<Head> sharded(head, group,
                                                       {.shard = shard, .mixed_precision = types});
      train(group, sharded, sharded.named_parameters());
      const auto unsharded = sharded.unsharded();
      EXPECT_TRUE(head->a.equal(whole->a)) << "two ranks: a sum of two has one order";
    }
  });
}

}  // namespace grad_scaler_test
}  // namespace cohort
