// SPDX-License-Identifier: Apache-2.0
// What meets a sharded model from outside: leaves and other models in its loss, who reads its
// parameters between steps, side outputs of its units, graphs that outlive it.
#include <gtest/gtest.h>
#include <sstream>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/strategy.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/difference.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace sharding_boundary_test {

using comm::ProcessGroup;
using parallel::DistributedDataParallel;
using parallel::LocalShard;
using test::message_of;
using test::sharding::batch_of;
using test::sharding::FullyShardedDataParallel;
using test::sharding::kRounding;
using test::sharding::kShards;
using test::sharding::loss_of;
using test::sharding::Shard;
using test::sharding::ShardingOptions;
using test::sharding::Tower;
using Sharded = FullyShardedDataParallel<Tower>;

Tower half_tower() {
  Tower tower;
  const at::NoGradGuard no_grad;
  for (auto& parameter : tower->parameters()) parameter.mul_(0.5);
  return tower;
}

at::Tensor leaf(double value) {
  return at::full({1}, value, at::kDouble).requires_grad_(true);
}

// Sums of fewer than 1,000 float64 terms, in another order.
constexpr double kBound = 1e-12;

void expect_near(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(found.allclose(expected, kBound, kBound))
      << what << ": found " << found.flatten().slice(0, 0, 4) << ", expected "
      << expected.flatten().slice(0, 0, 4);
}

// What the shards hold of gradients against the whole gradients of a plain model.
void expect_gradients(const std::vector<LocalShard>& shards, torch::nn::Module& plain) {
  const auto expected = plain.named_parameters();
  for (const LocalShard& local_shard : shards) {
    const at::Tensor& whole = expected[local_shard.name].grad();
    ASSERT_EQ(local_shard.tensor.grad().defined(), whole.defined()) << local_shard.name;
    if (!whole.defined()) continue;
    expect_near(local_shard.tensor.grad().flatten(),
                whole.flatten().narrow(0, local_shard.begin, local_shard.end - local_shard.begin),
                local_shard.name);
  }
}

// An input, a temperature and a bias that no model owns.
struct Outside {
  explicit Outside(int rank) : x(batch_of(rank, 0).requires_grad_(true)) {}
  at::Tensor x, temperature = leaf(0.7), bias = leaf(-0.2);
};

void expect_leaves_outside(const ProcessGroup& group) {
  for (const Shard shard : kShards) {
    SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)));
    const auto loss = [](auto&& forward, const Outside& leaves) {
      return loss_of(forward(leaves.x) * leaves.temperature + leaves.bias);
    };
    Tower plain;
    for (int rank = 0; rank < group.size(); ++rank) {
      const Outside leaves(rank);
      const auto forward = [&](const at::Tensor& x) { return plain->forward(x); };
      (loss(forward, leaves) / group.size()).backward();
    }
    Tower alone;
    const Outside expected(group.rank());
    loss([&](const at::Tensor& x) { return alone->forward(x); }, expected).backward();

    Tower model;
    Sharded sharded(model, group, {.shard = shard}, model->units());
    const Outside found(group.rank());
    loss([&](const at::Tensor& x) { return sharded(x); }, found).backward();
    expect_near(found.x.grad(), expected.x.grad(), "the input");
    expect_near(found.temperature.grad(), expected.temperature.grad(), "the temperature");
    expect_near(found.bias.grad(), expected.bias.grad(), "the bias");
    expect_gradients(sharded.local_shards(), *plain);
  }
}

TEST(ShardingBoundaryTest, LeavesOutsideOfTheModelKeepThisRanksOwnGradient) {
  for (const int ranks : {1, 2, 3, 4}) test::ranks(ranks, expect_leaves_outside);
}

void expect_other_models(const ProcessGroup& group) {
  for (const Shard shard : kShards) {
    SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)));
    const auto loss = [](auto&& first, auto&& second, auto&& third, int rank) {
      const at::Tensor y = first(batch_of(rank, 0));
      return loss_of(y) + loss_of(second(y)) + loss_of(third(y));
    };
    const auto plainly = [](Tower& tower) {
      return [&tower](const at::Tensor& x) { return tower->forward(x); };
    };
    Tower plain_a;
    Tower plain_b = half_tower();
    Tower plain_c = half_tower();
    for (int rank = 0; rank < group.size(); ++rank) {
      (loss(plainly(plain_a), plainly(plain_b), plainly(plain_c), rank) / group.size()).backward();
    }
    Tower model_a;
    Tower model_b = half_tower();
    Tower model_c = half_tower();
    Sharded a(model_a, group, {.shard = shard}, model_a->units());
    Sharded b(model_b, group, {.shard = shard}, model_b->units());
    DistributedDataParallel<Tower> c(model_c, group);
    loss(a, b, c, group.rank()).backward();
    expect_gradients(a.local_shards(), *plain_a);
    expect_gradients(b.local_shards(), *plain_b);
    expect_gradients(parallel::full_shards_of(*model_c), *plain_c);
    // Beside one sharded model.
    c.module()->zero_grad();
    plain_a->zero_grad();
    plain_c->zero_grad();
    for (const LocalShard& local_shard : a.local_shards())
      local_shard.tensor.mutable_grad().reset();
    const auto none = [](const at::Tensor& x) { return x.detach(); };
    for (int rank = 0; rank < group.size(); ++rank)
      (loss(plainly(plain_a), none, plainly(plain_c), rank) / group.size()).backward();
    loss(a, none, c, group.rank()).backward();
    expect_gradients(a.local_shards(), *plain_a);
    expect_gradients(parallel::full_shards_of(*model_c), *plain_c);
  }
}

TEST(ShardingBoundaryTest, OtherModelsInTheLossKeepTheMeanGradient) {
  for (const int ranks : {2, 3}) test::ranks(ranks, expect_other_models);
}

void expect_named(const std::function<void()>& use, const std::vector<std::string>& parts) {
  const std::string text = message_of<c10::Error>(use);
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "expected: " << part << ", found: " << text;
}

// All that reads a parameter's elements; names and shapes are there.
void expect_unreadable(Tower& model) {
  const std::vector<std::string> parts{"sharding: ", "while unsharded() lives"};
  expect_named([&] { model->forward(batch_of(0, 0)); }, parts);
  expect_named([&] { model->parameters()[0].clone(); }, parts);
  expect_named([&] { model->parameters()[3].mean().item<double>(); }, parts);
  expect_named(
      [&] {
        std::stringstream file;
        torch::save(model, file);
      },
      parts);
  EXPECT_EQ(model->block->first->weight.sizes(), (std::vector<int64_t>{7, 3}));
}

std::vector<at::Tensor> trained(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& each : tensors)
    if (each.requires_grad()) result.push_back(each);
  return result;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool sgd, std::vector<at::Tensor> tensors) {
  if (!sgd) return std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(1e-2));
  return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(1e-3).momentum(0.9));
}

// What a forward between backward and step does to what is read after the step.
enum class Between { kNothing, kForwardWithoutGradients, kForwardWithAGraph };

void expect_whole_or_named(const ProcessGroup& group, Shard shard, bool sgd, Between between) {
  SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)) + " sgd " + std::to_string(sgd) +
               " between " + std::to_string(static_cast<int>(between)));
  Tower plain;
  const auto plain_optimizer = make_optimizer(sgd, trained(plain->parameters()));
  Tower model;
  Sharded sharded(model, group, {.shard = shard}, model->units());
  const auto optimizer = make_optimizer(sgd, sharded.parameters());
  expect_unreadable(model);
  for (int step = 0; step < 3; ++step) {
    plain_optimizer->zero_grad();
    for (int rank = 0; rank < group.size(); ++rank)
      (loss_of(plain->forward(batch_of(rank, step))) / group.size()).backward();
    optimizer->zero_grad();
    loss_of(sharded(batch_of(group.rank(), step))).backward();
    expect_unreadable(model);
    at::Tensor output;
    if (between == Between::kForwardWithAGraph) output = sharded(batch_of(0, 9));
    if (between == Between::kForwardWithoutGradients) {
      const at::NoGradGuard no_grad;
      output = sharded(batch_of(0, 9));
    }
    if (output.defined()) expect_near(output, plain->forward(batch_of(0, 9)), "before the step");
    plain_optimizer->step();
    optimizer->step();
    expect_unreadable(model);
    {
      const auto whole = sharded.unsharded();
      EXPECT_LE(test::difference(*model, *plain), kRounding);
      expect_near(model->forward(batch_of(1, 8)), plain->forward(batch_of(1, 8)),
                  "the module's own");
    }
    expect_unreadable(model);
    expect_near(sharded(batch_of(1, 8)), plain->forward(batch_of(1, 8)), "the next forward");
  }
}

TEST(ShardingBoundaryTest, AfterAStepParametersAreTheNewOnesOrAnErrorNamesThem) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for (const Shard shard : kShards) {
        for (const bool sgd : {true, false}) {
          for (const Between between : {Between::kNothing, Between::kForwardWithoutGradients,
                                        Between::kForwardWithAGraph}) {
            expect_whole_or_named(group, shard, sgd, between);
          }
        }
      }
    });
  }
}

// The module's own parameters have no gradient: an optimizer made from them would skip them all,
// and their norm would be 0.
TEST(ShardingBoundaryTest, AnOptimizerOfTheModulesOwnParametersIsRefusedByName) {
  for (const int ranks : {1, 2}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for (const Shard shard : kShards) {
        Tower model;
        torch::optim::SGD before(model->parameters(), 0.1);
        Sharded sharded(model, group, {.shard = shard}, model->units());
        torch::optim::SGD after(model->parameters(), 0.1);
        torch::optim::SGD right(sharded.parameters(), 0.1);
        for (int step = 0; step < 2; ++step) {
          before.zero_grad();
          after.zero_grad();
          right.zero_grad();
          loss_of(sharded(batch_of(group.rank(), step))).backward();
          const std::vector<std::string> why{"sharding: table is ", "expected"};
          expect_named([&] { before.step(); }, why);
          expect_named([&] { after.step(); }, why);
          expect_named([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 0.1); },
                       {"the gradient of ", "parallel::clip_grad_norm_"});
          right.step();
        }
      }
    });
  }
}

TEST(ShardingBoundaryTest, AForwardThatThrowsLeavesNoParametersToRead) {
  ProcessGroup alone(comm::RankInfo{});
  for (const Shard shard : kShards) {
    Tower model;
    Sharded sharded(model, alone, {.shard = shard}, model->units());
    EXPECT_THROW(sharded(at::ones({2, 2}, at::kDouble)), c10::Error);
    expect_unreadable(model);
  }
}

TEST(ShardingBoundaryTest, WritingIntoShardsWhileGradientsWaitIsAnError) {
  ProcessGroup alone(comm::RankInfo{});
  for (const Shard shard : {Shard::kOptimizer, Shard::kGradients}) {
    Tower model;
    Sharded sharded(model, alone, {.shard = shard}, model->units());
    {
      const auto guard = sharded.no_sync();
      loss_of(sharded(batch_of(0, 0))).backward();
    }
    {
      const at::NoGradGuard no_grad;
      for (const LocalShard& local_shard : sharded.local_shards())
        if (local_shard.tensor.requires_grad()) local_shard.tensor.mul_(0.5);
    }
    expect_named([&] { sharded(batch_of(0, 0)); },
                 {"was written to while gradients wait since no_sync()"});
  }
}

// A rank without a batch has no backward: whether gradients wait differs between ranks. (Under ZeRO
// 3 a backward gathers.)
TEST(ShardingBoundaryTest, RanksMaySkipABackwardWhileTheyAccumulate) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients}) {
      Tower plain;
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      {
        const auto guard = sharded.no_sync();
        const at::Tensor loss = loss_of(sharded(batch_of(0, group.rank())));
        if (group.rank() == 0) loss.backward();
      }
      loss_of(sharded(batch_of(1, group.rank()))).backward();
      const at::Tensor sum = loss_of(plain->forward(batch_of(0, 0))) +
                             loss_of(plain->forward(batch_of(1, 0))) +
                             loss_of(plain->forward(batch_of(1, 1)));
      (sum / 2).backward();
      expect_gradients(sharded.local_shards(), *plain);
    }
  });
}

// Gradients of a batch wait, and those of an earlier one are reduced: a step may come.
TEST(ShardingBoundaryTest, AStepBesideGradientsThatWaitIsSeenByAllRanks) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      loss_of(sharded(batch_of(0, group.rank()))).backward();
      {
        const auto guard = sharded.no_sync();
        loss_of(sharded(batch_of(1, group.rank()))).backward();
      }
      for (const LocalShard& local_shard : sharded.local_shards())
        if (local_shard.tensor.grad().defined())
          local_shard.tensor.data().sub_(0.1 * local_shard.tensor.grad());
      const at::Tensor mine = sharded(batch_of(0, 0)).detach();
      at::Tensor theirs = mine.clone();
      group.broadcast(theirs, 0);
      EXPECT_TRUE(mine.equal(theirs))
          << "rank " << group.rank() << " computes with other weights than rank 0";
    }
  });
}

struct MatrixImpl : torch::nn::Module {
  explicit MatrixImpl(double phase) {
    constexpr int64_t kWidth = 400;  // 1.2 MiB
    const at::Tensor values = at::arange(kWidth * kWidth, at::kDouble).add(phase).sin() / 20;
    weight = register_parameter("weight", values.view({kWidth, kWidth}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(x.matmul(weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Matrix);

// Matrices of which the even ones are in no unit.
struct RootedImpl : torch::nn::Module {
  RootedImpl() {
    for (int i = 0; i < 5; ++i)
      matrices.push_back(register_module("m" + std::to_string(i), Matrix(0.3 * i)));
  }
  at::Tensor forward(at::Tensor x, bool uses_last = true) {
    x = matrices[0]->forward(x);
    // Backward reads it after the last gradient of that matrix.
    const at::Tensor first = x.matmul(matrices[4]->weight.detach());
    x = test::sharding::unit(matrices[1], x);
    x = matrices[2]->forward(x);
    x = test::sharding::unit(matrices[3], x);
    return first * x + (uses_last ? matrices[4]->forward(x) : x);
  }
  std::vector<torch::nn::Module*> units() { return {matrices[1].get(), matrices[3].get()}; }
  std::vector<Matrix> matrices;
};
TORCH_MODULE(Rooted);

at::Tensor rooted_batch(int rank, int step) {
  return at::arange(800, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({2, 400});
}

// What is in no unit may be used by some ranks only, in one bucket.
TEST(ShardingBoundaryTest, RanksMayUseDifferentParametersOfNoUnit) {
  for (const int ranks : {2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      Rooted plain;
      for (int rank = 0; rank < group.size(); ++rank)
        (loss_of(plain->forward(rooted_batch(rank, 0), rank == 0)) / group.size()).backward();
      for (const Shard shard : kShards) {
        Rooted model;
        FullyShardedDataParallel<Rooted> sharded(model, group, {.shard = shard}, model->units());
        loss_of(sharded(rooted_batch(group.rank(), 0), group.rank() == 0)).backward();
        expect_gradients(sharded.local_shards(), *plain);
      }
    });
  }
}

// Cut or in one bucket: the same sums.
TEST(ShardingBoundaryTest, AForwardOrderChangesNoBit) {
  for (const int ranks : {2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for (const Shard shard : kShards) {
        for (const auto& reduce_dtype : {std::optional<at::ScalarType>(), {at::kBFloat16}}) {
          std::vector<std::vector<at::Tensor>> trained;
          for (const bool ordered : {false, true}) {
            Rooted model;
            ShardingOptions options{.shard = shard,
                                    .mixed_precision = {.reduce_dtype = reduce_dtype}};
            for (const auto& item : model->named_parameters())
              if (ordered) options.forward_order.push_back(item.key());
            FullyShardedDataParallel<Rooted> sharded(model, group, options, model->units());
            optim::Adam adam(sharded.named_parameters());
            for (int step = 0; step < 3; ++step) {
              {
                const auto guard = sharded.no_sync();
                loss_of(sharded(rooted_batch(group.rank(), 2 * step))).backward();
              }
              loss_of(sharded(rooted_batch(group.rank(), 2 * step + 1))).backward();
              adam.step(1e-2);
              adam.zero_grad();
            }
            const auto whole = sharded.unsharded();
            trained.emplace_back();
            for (const at::Tensor& each : model->parameters())
              trained.back().push_back(each.detach().clone());
          }
          for (size_t i = 0; i < trained[0].size(); ++i)
            EXPECT_TRUE(at::equal(trained[0][i], trained[1][i]))
                << static_cast<int>(shard) << " matrix " << i;
        }
      }
    });
  }
}

// Frozen parameters are not gathered again and again, but when a checkpoint is loaded, say.
TEST(ShardingBoundaryTest, AForwardSeesWhatWasWrittenIntoFrozenLocalShards) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower plain;
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      for (int step = 0; step < 2; ++step) {
        expect_near(sharded(batch_of(0, 0)), plain->forward(batch_of(0, 0)), "output");
        const at::NoGradGuard no_grad;
        for (const at::Tensor& each : plain->frozen->parameters()) at::Tensor(each).mul_(0.5);
        for (const LocalShard& local_shard : sharded.local_shards())
          if (local_shard.name.starts_with("frozen.")) at::Tensor(local_shard.tensor).mul_(0.5);
      }
    }
  });
}

// Keeps a loss of its own in a member.
struct GateImpl : torch::nn::Module {
  explicit GateImpl(double phase) {
    weight =
        register_parameter("weight", at::arange(36, at::kDouble).add(phase).sin().view({6, 6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto keep = [&] { auxiliary = weight.t().square().sum() + weight.exp().sum(); };
    if (!keeps_last) keep();
    const at::Tensor y = at::tanh(x.matmul(weight));
    if (keeps_last) keep();
    return y;
  }
  at::Tensor weight, auxiliary;
  bool keeps_last = false;
};
TORCH_MODULE(Gate);

struct GatesImpl : torch::nn::Module {
  GatesImpl() {
    for (int i = 0; i < 4; ++i)
      gates.push_back(register_module("gate" + std::to_string(i), Gate(0.1 * i)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Gate& gate : gates) x = test::sharding::unit(gate, x);
    return x;
  }
  at::Tensor auxiliary() const {
    return gates[0]->auxiliary + gates[1]->auxiliary + gates[2]->auxiliary + gates[3]->auxiliary;
  }
  std::vector<torch::nn::Module*> units() {
    return {gates[0].get(), gates[1].get(), gates[2].get(), gates[3].get()};
  }
  std::vector<Gate> gates;
};
TORCH_MODULE(Gates);

at::Tensor gate_batch(int rank) {
  return at::arange(12, at::kDouble).mul(1 + rank).cos().view({2, 6});
}

TEST(ShardingBoundaryTest, ALossThatAUnitKeepsCountsBesideThatOfItsOutput) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for (const Shard shard : kShards) {
        for (const bool prefetch : {true, false}) {
          for (const bool keeps_last : {true, false}) {
            SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)) + " prefetch " +
                         std::to_string(prefetch) + " last " + std::to_string(keeps_last));
            Gates plain;
            for (int rank = 0; rank < group.size(); ++rank) {
              const at::Tensor output = plain->forward(gate_batch(rank));
              ((loss_of(output) + plain->auxiliary() * 0.1) / group.size()).backward();
            }
            Gates model;
            for (Gate& gate : model->gates) gate->keeps_last = keeps_last;
            FullyShardedDataParallel<Gates> sharded(
                model, group, {.shard = shard, .prefetch = prefetch}, model->units());
            for (int step = 0; step < 2; ++step) {
              for (const LocalShard& local_shard : sharded.local_shards())
                local_shard.tensor.mutable_grad().reset();
              const at::Tensor output = sharded(gate_batch(group.rank()));
              (loss_of(output) + model->auxiliary() * 0.1).backward();
              expect_gradients(sharded.local_shards(), *plain);
            }
          }
        }
      }
    });
  }
}

TEST(ShardingBoundaryTest, ALossThatAUnitKeepsIsRefusedByTheUnitsNameWithoutItsOutput) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool prefetch : {true, false}) {
      Gates model;
      FullyShardedDataParallel<Gates> sharded(model, group, {.prefetch = prefetch}, model->units());
      for (int step = 0; step < 2; ++step) {
        const at::Tensor output = sharded(gate_batch(group.rank()));
        expect_named([&] { model->gates[0]->auxiliary.backward(); },
                     {"sharding: ", "gate0", "expected "});
        expect_named([&] { model->gates[1]->weight.t().square().sum().backward(); },
                     {"sharding: gate1.weight is sharded"});
      }
      const auto loss = loss_of(sharded(gate_batch(group.rank())));
      loss.backward();
    }
  });
}

TEST(ShardingBoundaryTest, ABackwardAfterTheEndOfTheWrapperIsRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      at::Tensor loss;
      at::Tensor auxiliary;
      {
        Gates model;
        FullyShardedDataParallel<Gates> sharded(model, group, {.shard = shard}, model->units());
        loss = loss_of(sharded(gate_batch(0)));
        auxiliary = model->gates[0]->auxiliary;
      }
      const std::vector<at::Tensor> other{at::ones({1 << 20})};  // Where the engine was, perhaps.
      expect_named([&] { loss.backward(); }, {"sharding: a backward through ",
                                              "after the end of its FullyShardedDataParallel"});
    }
  });
}

// A penalty on the gradient of the input: a backward through a backward.
TEST(ShardingBoundaryTest, APenaltyOnTheInputsGradientWorksWhereParametersAreWhole) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto penalty = [](auto&& forward, int rank) {
      const at::Tensor x = batch_of(rank, 0).requires_grad_(true);
      return torch::autograd::grad({forward(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0]
          .square()
          .sum();
    };
    Tower plain;
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto forward = [&](const at::Tensor& x) { return plain->forward(x); };
      (penalty(forward, rank) / group.size()).backward();
    }
    for (const Shard shard : kShards) {
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      for (int step = 0; step < 2; ++step) {
        for (const LocalShard& local_shard : sharded.local_shards())
          local_shard.tensor.mutable_grad().reset();
        const auto run = [&] {
          penalty([&](const at::Tensor& x) { return sharded(x); }, group.rank()).backward();
        };
        if (shard == Shard::kParameters) {
          expect_named(run, {"sharding: "});
          continue;
        }
        run();
        expect_unreadable(model);
        for (const LocalShard& local_shard : sharded.local_shards()) {
          const at::Tensor whole = plain->named_parameters()[local_shard.name].grad();
          if (!whole.defined()) continue;
          ASSERT_TRUE(local_shard.tensor.grad().defined()) << local_shard.name;
          expect_near(
              local_shard.tensor.grad(),
              whole.flatten().narrow(0, local_shard.begin, local_shard.end - local_shard.begin),
              local_shard.name);
        }
        expect_named(
            [&] { loss_of(sharded(batch_of(0, 0))).backward({}, {}, /*create_graph=*/true); },
            {"sharding: backward with create_graph"});
      }
    }
  });
}

// The same graph once more, without a forward in between.
TEST(ShardingBoundaryTest, AfterAPlainBackwardThatThrewTheNextOneIsRight) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower plain;
      for (int rank = 0; rank < group.size(); ++rank)
        (loss_of(plain->forward(batch_of(rank, 0))) / group.size()).backward();
      Tower model;
      Sharded sharded(model, group, {.shard = shard}, model->units());
      bool throws = true;
      model->block->first->weight.register_hook([&](const at::Tensor&) {
        if (throws) throw std::out_of_range("once");
      });
      const at::Tensor loss = loss_of(sharded(batch_of(group.rank(), 0)));
      EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::out_of_range);
      throws = false;
      for (int i = 0; i < 2; ++i) {
        for (const LocalShard& local_shard : sharded.local_shards())
          local_shard.tensor.mutable_grad().reset();
        loss.backward({}, /*retain_graph=*/true);
        expect_gradients(sharded.local_shards(), *plain);
      }
    }
  });
}

struct ConvolutionImpl : torch::nn::Module {
  ConvolutionImpl() {
    const at::Tensor values = at::ones({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    weight = register_parameter("weight", values);
  }
  at::Tensor forward(const at::Tensor& x) { return at::conv2d(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Convolution);

TEST(ShardingBoundaryTest, AChannelsLastParameterIsRefusedByName) {
  ProcessGroup alone(comm::RankInfo{});
  for (const Shard shard : kShards) {
    Convolution model;
    expect_named(
        [&] { FullyShardedDataParallel<Convolution>(model, alone, {.shard = shard}); },
        {"sharding: weight [4, 3, 2, 2] has strides [12, 1, 6, 3]: expected a contiguous"});
  }
}

TEST(ShardingBoundaryTest, AnErrorInsideNoSyncLeavesAParallelModelSynchronized) {
  test::ranks(3, [](const ProcessGroup& group) {
    using parallel::Strategy;
    Tower plain;
    for (int rank = 0; rank < group.size(); ++rank)
      (loss_of(plain->forward(batch_of(rank, 0))) / group.size()).backward();
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero3}) {
      Tower model;
      parallel::ParallelModel<Tower> wrapped(model, group, {.strategy = strategy}, model->units());
      const auto bad_batch = [&] {
        const auto guard = wrapped.no_sync();
        wrapped(at::ones({2, 2}, at::kDouble));
      };
      EXPECT_THROW(bad_batch(), c10::Error);
      loss_of(wrapped(batch_of(group.rank(), 0))).backward();
      expect_gradients(wrapped.local_shards(), *plain);
    }
  });
}

TEST(DifferenceTest, OfNaNPassesNoComparison) {
  Tower tower;
  Tower other;
  EXPECT_EQ(test::difference(*tower, *other), 0);
  {
    const at::NoGradGuard no_grad;
    other->table.view({-1})[2] = std::nan("");
  }
  for (const double found : {test::difference(*tower, *other), test::difference(*other, *tower)}) {
    EXPECT_FALSE(found <= 1);
    EXPECT_FALSE(found > 1);
  }
}

}  // namespace sharding_boundary_test
}  // namespace cohort
