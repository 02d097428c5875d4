// SPDX-License-Identifier: Apache-2.0
// Muon on ranks, against one process that has every matrix whole.
#include "cohort/parallel/muon.h"

#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/linalg_svdvals.h>
#include <gtest/gtest.h>

#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/strategy.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace muon_test {

using comm::ProcessGroup;
using parallel::FullyShardedDataParallel;
using parallel::LocalShard;
using parallel::Muon;
using parallel::Shard;
using test::sharding::batch_of;
using test::sharding::loss_of;
using test::sharding::Tower;

constexpr int kSteps = 6;
constexpr double kRate = 0.02;
// float64: gradients differ by the order of summation, some 1e-15 of their size. Orthogonalizing
// multiplies the smallest singular directions by up to a^5 = 485, and 6 steps of a net that sees
// its own updates add to it.
constexpr double kBound = 1e-10;

// Matrices go to Muon, the rest to Adam.
struct Optimizers {
  Optimizers(const std::vector<LocalShard>& shards, const ProcessGroup& group)
      : muon(matrices(shards), group, {.weight_decay = 0.1}), adam(others(shards)) {}

  static std::vector<LocalShard> matrices(std::vector<LocalShard> shards) {
    std::erase_if(shards,
                  [](const LocalShard& local_shard) { return local_shard.shape.size() < 2; });
    return shards;
  }
  static std::vector<std::pair<std::string, at::Tensor>> others(
      const std::vector<LocalShard>& shards) {
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const LocalShard& local_shard : shards) {
      if (local_shard.shape.size() < 2 && local_shard.tensor.requires_grad())
        named.emplace_back(local_shard.name, local_shard.tensor);
    }
    return named;
  }
  void step() {
    muon.step(kRate);
    muon.zero_grad();
    adam.step(kRate);
    adam.zero_grad();
  }

  Muon muon;
  optim::Adam adam;
};

// Trains one process on the mean of all ranks' losses, and `model` on this rank's; then every shard
// is a part of the plain model's parameter.
template <class Model>
void expect_plain_training(const ProcessGroup& group, Model& model,
                           const std::vector<LocalShard>& shards) {
  const ProcessGroup alone(comm::RankInfo{});
  Tower plain;
  Optimizers whole(parallel::full_shards_of(*plain), alone);
  Optimizers ours(shards, group);
  for (int step = 0; step < kSteps; ++step) {
    for (int rank = 0; rank < group.size(); ++rank)
      (loss_of(plain->forward(batch_of(rank, step))) / group.size()).backward();
    whole.step();
    loss_of(model(batch_of(group.rank(), step))).backward();
    ours.step();
  }
  const at::NoGradGuard no_grad;
  const auto expected = plain->named_parameters();
  for (const LocalShard& local_shard : shards) {
    const at::Tensor part = expected[local_shard.name].reshape({-1}).narrow(
        0, local_shard.begin, local_shard.end - local_shard.begin);
    EXPECT_LE((local_shard.tensor.reshape({-1}) - part).abs().max().template item<double>(), kBound)
        << local_shard.name;
  }
  EXPECT_GT((expected["table"] - Tower()->table).abs().max().template item<double>(), kRate);
}

void expect_every_strategy(const ProcessGroup& group) {
  Tower replicated;
  parallel::DistributedDataParallel<Tower> ddp(replicated, group);
  expect_plain_training(group, ddp, parallel::full_shards_of(*replicated));
  for (const Shard shard : test::sharding::kShards) {
    SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)));
    Tower tower;
    FullyShardedDataParallel<Tower> sharded(tower, group, {.shard = shard}, tower->units());
    expect_plain_training(group, sharded, sharded.local_shards());
  }
}

TEST(MuonTest, TwoRanksEqualOneProcessUnderEveryStrategy) {
  test::ranks(2, expect_every_strategy);
}

TEST(MuonTest, ThreeRanksEqualOneProcessUnderEveryStrategy) {
  test::ranks(3, expect_every_strategy);
}

TEST(MuonTest, OrthogonalizeKeepsDirectionsAndEvensOutTheirSizes) {
  torch::manual_seed(3);
  for (const auto& shape : {std::vector<int64_t>{8, 8}, {5, 12}, {12, 5}, {1, 4}}) {
    const at::Tensor noise = at::randn(shape, at::kDouble);
    const auto [u, ignored, vt] = at::linalg_svd(noise, /*full_matrices=*/false);
    // Singular values from 1 down to 0.1.
    const at::Tensor sizes = at::linspace(1, 0.1, u.size(1), at::kDouble);
    const at::Tensor result = parallel::orthogonalize(at::mm(u * sizes, vt).mul_(7));
    const at::Tensor diagonal = at::mm(at::mm(u.t(), result), vt.t());
    const at::Tensor found = diagonal.diagonal();
    EXPECT_GE(found.min().item<double>(), 0.6) << found;
    EXPECT_LE(found.max().item<double>(), 1.2) << found;
    EXPECT_LE((diagonal - found.diag()).abs().max().item<double>(), 1e-12);
  }
  EXPECT_EQ(parallel::orthogonalize(at::zeros({2, 3})).abs().max().item<float>(), 0);
}

// The first step by hand, with one iteration.
TEST(MuonTest, AStepIsTheSourcesFormula) {
  const ProcessGroup alone(comm::RankInfo{});
  at::Tensor p = at::full({2, 1}, 3.0, at::kDouble).requires_grad_();
  at::Tensor idle = at::ones({2, 2}, at::kDouble).requires_grad_();
  Muon muon({{"p", {2, 1}, 0, 2, p}, {"idle", {2, 2}, 0, 4, idle}}, alone,
            {.momentum = 0.9, .weight_decay = 0.5, .num_iterations = 1});
  p.mutable_grad() = at::tensor({3.0, 4.0}, at::kDouble).view({2, 1});
  muon.step(0.1);
  // u is a multiple of the gradient; x = (0.6, 0.8) has the singular value 1, which one iteration
  // takes to a + b + c = 0.701. R / C = 2.
  const double size = 0.1 * std::sqrt(2.0) * 0.701;
  const at::Tensor expected =
      at::tensor({3.0 * 0.95 - size * 0.6, 3.0 * 0.95 - size * 0.8}, at::kDouble).view({2, 1});
  EXPECT_LE((p - expected).abs().max().item<double>(), 1e-6);  // 1e-7 beside the norm 0.5
  const auto state = muon.state();
  ASSERT_EQ(state.size(), 2U);
  EXPECT_EQ(state[1].first, "p.momentum");
  EXPECT_LE((state[1].second - p.grad() * 0.1).abs().max().item<double>(), 1e-15);
  EXPECT_TRUE(at::equal(idle, at::ones({2, 2}, at::kDouble))) << "no gradient, no decay";
  EXPECT_EQ(test::message_of<c10::ValueError>([&] {
              Muon refused({{"bias", {3}, 0, 3, at::ones({3}).requires_grad_()}}, alone);
            }),
            "Muon: expected parameters of two dimensions or more, got bias of shape [3]");
}

TEST(MuonTest, AMatrixWithoutElementsStaysAsItIs) {
  const ProcessGroup alone(comm::RankInfo{});
  for (const auto& shape : {std::vector<int64_t>{0, 3}, {3, 0}, {2, 0, 4}}) {
    SCOPED_TRACE(testing::PrintToString(shape));
    at::Tensor none = at::empty(shape).requires_grad_();
    at::Tensor p = at::ones({2, 2}).requires_grad_();
    Muon muon({{"none", shape, 0, 0, none}, {"p", {2, 2}, 0, 4, p}}, alone);
    none.mutable_grad() = at::empty(shape);
    p.mutable_grad() = at::eye(2);
    muon.step(0.1);
    EXPECT_EQ(none.sizes(), shape);
    EXPECT_FALSE(p.equal(at::ones({2, 2})));
  }
}

}  // namespace muon_test
}  // namespace cohort
