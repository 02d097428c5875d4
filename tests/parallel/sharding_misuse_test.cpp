// SPDX-License-Identifier: Apache-2.0
// Unexpected uses of a sharded model: which ones work, and which ones are rejected with an error
// that says what is wrong and how to fix it.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "cohort/parallel/strategy.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace sharding_misuse_test {

using comm::ProcessGroup;
using parallel::LocalShard;
using parallel::ParallelModel;
using test::message_of;
using test::sharding::batch_of;
using test::sharding::FullyShardedDataParallel;
using test::sharding::kRounding;
using test::sharding::loss_of;
using test::sharding::Shard;
using test::sharding::ShardingOptions;
using test::sharding::Tower;
using Sharded = FullyShardedDataParallel<Tower>;

void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "expected: " << part << "\nfound: " << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

Tower half_tower() {
  Tower tower;
  const at::NoGradGuard no_grad;
  for (auto& parameter : tower->parameters()) parameter.mul_(0.5);
  return tower;
}

// The sum over ranks of the elements that the shards hold of gradients, by parameter, against the
// plain models' gradients.
void expect_gradients(const Sharded& sharded, Tower& plain) {
  const auto expected = plain->named_parameters();
  for (const LocalShard& local_shard : sharded.local_shards()) {
    const at::Tensor& whole = expected[local_shard.name].grad();
    ASSERT_EQ(local_shard.tensor.grad().defined(), whole.defined()) << local_shard.name;
    if (!whole.defined()) continue;
    const at::Tensor part =
        whole.reshape({-1}).narrow(0, local_shard.begin, local_shard.end - local_shard.begin);
    EXPECT_LE((local_shard.tensor.grad() - part).abs().max().item<double>(), kRounding)
        << local_shard.name;
  }
}

at::Tensor joint_loss(const at::Tensor& first, const at::Tensor& of_both) {
  return loss_of(first) + loss_of(first * of_both);
}

TEST(ShardingMisuseTest, ALossOfTwoShardedModelsIsThatOfOneProcess) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      Tower plain_a;
      Tower plain_b = half_tower();
      for (int rank = 0; rank < 2; ++rank) {
        const at::Tensor y = plain_a->forward(batch_of(rank, 0));
        (joint_loss(y, plain_b->forward(y)) / 2).backward();
      }
      Tower model_a;
      Tower model_b = half_tower();
      Sharded a(model_a, group, {.shard = shard}, model_a->units());
      Sharded b(model_b, group, {.shard = shard}, model_b->units());
      const auto loss = [&] {
        const at::Tensor y = a(batch_of(group.rank(), 0));
        return joint_loss(y, b(y));
      };
      const auto forget = [](const Sharded& model) {
        for (const LocalShard& local_shard : model.local_shards())
          local_shard.tensor.mutable_grad().reset();
      };
      for (int step = 0; step < 2; ++step) {
        forget(a);
        forget(b);
        loss().backward();
        expect_gradients(a, plain_a);
        expect_gradients(b, plain_b);
      }
    }
  });
}

TEST(ShardingMisuseTest, GradientsOfOneModelsLossWaitForThoseOfALossOfTwo) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      const auto x = [](int rank) { return batch_of(rank, 0); };
      Tower plain_a;
      Tower plain_b = half_tower();
      for (int rank = 0; rank < group.size(); ++rank) {
        (loss_of(plain_a->forward(x(rank))) / group.size()).backward();
        (loss_of(plain_a->forward(x(rank)) + plain_b->forward(x(rank))) / group.size()).backward();
      }
      Tower model_a;
      Tower model_b = half_tower();
      Sharded a(model_a, group, {.shard = shard}, model_a->units());
      Sharded b(model_b, group, {.shard = shard}, model_b->units());
      {
        const auto guard = a.no_sync();
        loss_of(a(x(group.rank()))).backward();
      }
      loss_of(a(x(group.rank())) + b(x(group.rank()))).backward();
      expect_gradients(a, plain_a);
      expect_gradients(b, plain_b);
    }
  });
}

TEST(ShardingMisuseTest, ParallelModelsMeetInALossUnderEveryStrategy) {
  test::ranks(2, [](const ProcessGroup& group) {
    using parallel::Strategy;
    Tower plain_a;
    Tower plain_b = half_tower();
    for (int rank = 0; rank < 2; ++rank) {
      const at::Tensor y = plain_a->forward(batch_of(rank, 0));
      (joint_loss(y, plain_b->forward(y)) / 2).backward();
    }
    for (const auto& [of_a, of_b] : {std::pair{Strategy::kZero3, Strategy::kZero3},
                                     {Strategy::kZero3, Strategy::kDdp},
                                     {Strategy::kDdp, Strategy::kDdp}}) {
      Tower model_a;
      Tower model_b = half_tower();
      ParallelModel<Tower> a(model_a, group, {.strategy = of_a}, model_a->units());
      ParallelModel<Tower> b(model_b, group, {.strategy = of_b}, model_b->units());
      const at::Tensor y = a(batch_of(group.rank(), 0));
      joint_loss(y, b(y)).backward();
      for (auto& [model, plain] : {std::pair{&a, &plain_a}, {&b, &plain_b}}) {
        double sum = 0;
        for (const auto& parameter : (*plain)->parameters())
          if (parameter.grad().defined()) sum += parameter.grad().square().sum().item<double>();
        EXPECT_NEAR(model->gradient_norm(), std::sqrt(sum), 1e-9 * std::sqrt(sum));
      }
    }
  });
}

TEST(ShardingMisuseTest, AParameterThatIsElsewhereIsNamed) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tower model;
    Sharded sharded(model, group, {}, model->units());
    const at::Tensor x = batch_of(group.rank(), 0);
    const auto expect_named = [&](const std::string& name, const std::function<void()>& use) {
      expect_text(message_of<c10::Error>(use),
                  {"sharding: " + name + " is sharded", "within its unit", "(a penalty on it",
                   "while unsharded() lives"});
    };
    const at::Tensor& weight = model->block->first->weight;
    const std::string name = "block.first.weight";
    const auto penalty = [&] { return weight.pow(2).sum(); };
    expect_named(name, penalty);
    expect_named(name, [&] { (loss_of(sharded(x)) + 0.1 * penalty()).backward(); });
    expect_named(name, [&] { weight.detach().clone(); });
    expect_named(name, [&] {
      const at::NoGradGuard no_grad;
      model->block->first->weight.fill_(1);
    });
    expect_named("block.first.bias", [&] { model->block->forward(at::ones({2, 3}, at::kDouble)); });
    expect_named("table", [&] { model->forward(x); });
    // Recorded while it was there, needed when it is gone.
    at::Tensor recorded;
    {
      const auto whole = sharded.unsharded();
      recorded = penalty();
    }
    expect_named(name, [&] { recorded.backward(); });
    EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{7, 3})) << "its shape is there";
    loss_of(sharded(x)).backward();
  });
}

TEST(ShardingMisuseTest, AnOptimizerOfTheModulesOwnParametersIsRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      Tower model;
      torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.1));
      torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
      Sharded sharded(model, group, {.shard = shard}, model->units());
      loss_of(sharded(batch_of(group.rank(), 0))).backward();
      for (torch::optim::Optimizer* each :
           std::initializer_list<torch::optim::Optimizer*>{&adamw, &sgd})
        expect_text(message_of<c10::Error>([&] { each->step(); }),
                    {"sharding: table is ",
                     "An optimizer that holds it was made from the module's own parameters, which "
                     "FullyShardedDataParallel has taken: make it from the wrapped model's "
                     "parameters(), after wrapping"});
    }
  });
}

TEST(ShardingMisuseTest, TheModulesOwnZeroGradIsRefusedAtTheNextForward) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(0.1));
      const at::Tensor x = batch_of(group.rank(), 0);
      model->zero_grad();  // There is nothing to clear yet.
      loss_of(sharded(x)).backward();
      loss_of(sharded(x)).backward();  // Accumulates.
      model->zero_grad();
      expect_text(message_of<c10::ValueError>([&] { sharded(x); }),
                  {"sharding: the module's own zero_grad() has not cleared the gradient of ",
                   "expected the optimizer's zero_grad()"});
      model->zero_grad();
      sgd.zero_grad();
      loss_of(sharded(x)).backward();
    }
  });
}

// Nobody has cleared anything: parameters were left whole by what ended half way.
TEST(ShardingMisuseTest, AForwardAfterABackwardThatThrewIsNotTakenForZeroGrad) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      const at::Tensor x = batch_of(group.rank(), 0);
      loss_of(sharded(x)).backward();  // Gradients wait in the shards.
      const at::Tensor out = sharded(x);
      out.register_hook([](const at::Tensor&) -> at::Tensor { throw std::out_of_range("once"); });
      EXPECT_THROW(loss_of(out).backward(), std::out_of_range);
      loss_of(sharded(x)).backward();
    }
  });
}

TEST(ShardingMisuseTest, AForwardAfterAGradientOfGradientsIsNotTakenForZeroGrad) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients}) {
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      const at::Tensor x = batch_of(group.rank(), 0).requires_grad_();
      loss_of(sharded(x)).backward();
      torch::autograd::grad({sharded(x).sum()}, {x}, {}, true, /*create_graph=*/true);
      loss_of(sharded(x)).backward();
    }
  });
}

TEST(ShardingMisuseTest, GuardsOfWholeParametersLieInOneAnother) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tower model;
    ParallelModel<Tower> zero3(model, group, {.strategy = parallel::Strategy::kZero3},
                               model->units());
    const Tower expected;
    const auto is_whole = [&] {
      return model->block->first->weight.equal(expected->block->first->weight);
    };
    {
      const auto outer = zero3.unsharded();
      {
        const auto inner = zero3.unsharded();
        EXPECT_TRUE(is_whole());
      }
      EXPECT_TRUE(is_whole()) << "the inner one has ended, the outer one lives";
      const std::string text = message_of<c10::ValueError>([&] { zero3(batch_of(0, 0)); });
      expect_text(text, {"a forward of the wrapped model while unsharded() lives"});
      EXPECT_TRUE(is_whole());
    }
    EXPECT_THROW(is_whole(), c10::Error);
  });
}

TEST(ShardingMisuseTest, UnshardedBetweenForwardAndBackwardChangesNothing) {
  test::ranks(4, [](const ProcessGroup& group) {
    Tower plain;
    for (int rank = 0; rank < 4; ++rank)
      (loss_of(plain->forward(batch_of(rank, 0))) / 4).backward();
    for (const int reshard_ranks : {0, 2}) {
      Tower model;
      Sharded sharded(model, group, {.reshard_ranks = reshard_ranks}, model->units());
      const at::Tensor loss = loss_of(sharded(batch_of(group.rank(), 0)));
      const auto backward = [&] { loss.backward({}, /*retain_graph=*/true); };
      {
        const auto whole = sharded.unsharded();
        expect_text(message_of<c10::ValueError>(backward), {"a backward while unsharded() lives"});
      }
      backward();
      expect_gradients(sharded, plain);
    }
  });
}

// Some parameters stay gathered after a forward that no backward follows.
TEST(ShardingMisuseTest, WhatIsUnshardedAfterAForwardIsWhatSlicesHold) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tower model;
    Sharded sharded(model, group, {}, model->units());
    const at::Tensor loss = loss_of(sharded(batch_of(0, 0)));
    {
      const at::NoGradGuard no_grad;
      for (const LocalShard& local_shard : sharded.local_shards()) local_shard.tensor.fill_(2);
    }
    const auto whole = sharded.unsharded();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(item.value().eq(2).all().item<bool>()) << item.key();
  });
}

// Every rank must end with a PeerError that holds all of `texts`; rank 1's says what it left out.
void expect_disagreement(const std::vector<std::string>& texts, const std::string& left_out,
                         const std::function<void(const ProcessGroup&)>& body) {
  const auto ends = test::run_ranks(2, body, {.timeout = std::chrono::seconds(20)});
  const auto holds = [](const test::RankEnd& end, const std::string& text) {
    return end.output.find(text) != std::string::npos;
  };
  for (const test::RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, 3) << end.output;
    EXPECT_TRUE(holds(end, "expected every rank to run the same units in the same order"))
        << end.output;
    for (const std::string& text : texts)
      EXPECT_TRUE(holds(end, text)) << end.output << "expected: " << text;
  }
  if (left_out.empty()) return;
  EXPECT_FALSE(holds(ends[0], left_out)) << ends[0].output;
  EXPECT_TRUE(holds(ends[1], left_out)) << ends[1].output << "expected: " << left_out;
}

// Four blocks of one size, of which rank 1 may leave out one, or a parameter of one.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), test::sharding::Outer(3)));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (i == without_block) continue;
      blocks[i]->scaled = i != without_scale;
      x = test::sharding::unit(blocks[i], x);
    }
    return x;
  }
  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (auto& block : blocks) all.push_back(block.get());
    return all;
  }
  std::vector<test::sharding::Outer> blocks;
  size_t without_block = 9;
  size_t without_scale = 9;
};
TORCH_MODULE(Stack);

void train_with_a_gap(const ProcessGroup& group, bool prefetch, int first_bad_step) {
  Stack model;
  FullyShardedDataParallel<Stack> sharded(model, group, {.prefetch = prefetch}, model->units());
  for (int step = 0; step < 3; ++step) {
    if (step == first_bad_step && group.rank() == 1) model->without_block = 1;
    loss_of(sharded(at::ones({2, 3}, at::kDouble))).backward();
  }
}

TEST(ShardingMisuseTest, AUnitThatOneRankLeavesOutIsNamed) {
  expect_disagreement({"rank 1 calls all_gather (unit block2, block2.scale and on)",
                       "where rank 0 calls all_gather (unit block1, block1.scale and on)"},
                      "", [](const ProcessGroup& group) {
                        train_with_a_gap(group, /*prefetch=*/false, /*first_bad_step=*/0);
                      });
}

TEST(ShardingMisuseTest, AUnitThatWasPrefetchedAndLeftOutIsNamedInBackward) {
  expect_disagreement({"where rank 0 calls all_gather (unit block1"},
                      "rank 1 has not run unit block1", [](const ProcessGroup& group) {
                        train_with_a_gap(group, /*prefetch=*/true, /*first_bad_step=*/2);
                      });
}

TEST(ShardingMisuseTest, AForwardWithinNoSyncOnOneRankOnlyIsNamed) {
  expect_disagreement({"and each forward and backward within no_sync on every rank or on none"}, "",
                      [](const ProcessGroup& group) {
                        Stack model;
                        FullyShardedDataParallel<Stack> sharded(
                            model, group, {.shard = Shard::kGradients}, model->units());
                        const at::Tensor x = at::ones({2, 3}, at::kDouble);
                        if (group.rank() == 0) {
                          const auto guard = sharded.no_sync();
                          loss_of(sharded(x)).backward();
                        } else {
                          sharded(x);
                        }
                        sharded(x);
                      });
}

TEST(ShardingMisuseTest, AParameterThatOneRankLeavesOutIsNamed) {
  expect_disagreement({"where rank 0 calls reduce_scatter(avg) (unit block1"},
                      "rank 1 has no gradient of block1.scale", [](const ProcessGroup& group) {
                        Stack model;
                        if (group.rank() == 1) model->without_scale = 1;
                        FullyShardedDataParallel<Stack> sharded(model, group, {}, model->units());
                        loss_of(sharded(at::ones({2, 3}, at::kDouble))).backward();
                      });
}

}  // namespace sharding_misuse_test
}  // namespace cohort
