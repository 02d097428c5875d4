// SPDX-License-Identifier: Apache-2.0
// What every wrapper of a model offers: parameters, clipping, guards, moves, units.
#include <gtest/gtest.h>
#include <limits>
#include <optional>
#include <sstream>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include "cohort/parallel/clip_grad.h"
#include "cohort/parallel/strategy.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace model_wrapper_test {

using comm::ProcessGroup;
using parallel::DistributedDataParallel;
using parallel::FullyShardedDataParallel;
using parallel::ParallelModel;
using parallel::Shard;
using parallel::Strategy;
using parallel::Unit;
using test::message_of;

// float64: sums of fewer than 1,000 terms, in another order. A step of AdamW divides gradients by
// their own size.
constexpr double kBound = 1e-10;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    linear = register_module("linear", torch::nn::Linear(width, width));
  }
  at::Tensor forward(const at::Tensor& x, double scale = 1) { return x + scale * linear(x).tanh(); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Block);

// A Linear's forward is not const, this one is.
struct HalfImpl : torch::nn::Module {
  HalfImpl() { weight = register_parameter("weight", at::full({3}, 0.5)); }
  at::Tensor forward(at::Tensor x) const { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Half);

// `BlockHolder`: Block, or Unit<Block>.
template <class BlockHolder, class HalfHolder>
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), BlockHolder(3)));
    half = register_module("half", HalfHolder());
    frozen = register_module("frozen", torch::nn::Linear(3, 3));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters())
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(phase += 1).sin().view(parameter.sizes()));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(at::Tensor x) {
    x = blocks[0](x);
    x = blocks[1](x, 0.5);
    return frozen(half(blocks[2](x)));
  }
  std::vector<BlockHolder> blocks;
  HalfHolder half{nullptr};
  torch::nn::Linear frozen{nullptr};
};
using PlainNetImpl = NetImpl<Block, Half>;
TORCH_MODULE(PlainNet);
using UnitNetImpl = NetImpl<Unit<Block>, Unit<Half>>;
TORCH_MODULE(UnitNet);

at::Tensor batch_of(int rank, int step = 0) {
  return at::arange(6, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({2, 3});
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

void add_plain_gradients(PlainNet& net, int world_size, int step = 0) {
  for (int rank = 0; rank < world_size; ++rank)
    (loss_of(net->forward(batch_of(rank, step))) / world_size).backward();
}

std::vector<at::Tensor> trained(const PlainNet& net) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& each : net->parameters())
    if (each.requires_grad()) tensors.push_back(each);
  return tensors;
}

// Calls body(make) for each strategy that one host has; make() returns a wrapper of a new net.
template <class Body>
void for_each_strategy(const ProcessGroup& group, Body body) {
  for (const Strategy strategy :
       {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
    SCOPED_TRACE(parallel::to_string(strategy) + " on " + std::to_string(group.size()));
    body([&] { return ParallelModel(UnitNet(), group, {.strategy = strategy}); });
  }
}

template <class Model>
void expect_whole(Model& model, PlainNet& expected) {
  const auto whole = model.unsharded();
  const auto other = expected->named_parameters();
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(item.value().allclose(other[item.key()], kBound, kBound)) << item.key();
}

// Gradients by parameter, whatever part of them a rank holds.
template <class Model>
void expect_gradients(const Model& model, PlainNet& expected) {
  const auto other = expected->named_parameters();
  for (const auto& local_shard : model.local_shards()) {
    const at::Tensor& whole = other[local_shard.name].grad();
    ASSERT_EQ(local_shard.tensor.grad().defined(), whole.defined()) << local_shard.name;
    if (!whole.defined()) continue;
    EXPECT_TRUE(local_shard.tensor.grad().flatten().allclose(
        whole.flatten().narrow(0, local_shard.begin, local_shard.end - local_shard.begin), kBound,
        kBound))
        << local_shard.name;
  }
}

// emplace makes the new guard before it ends the old one.
TEST(NoSyncTest, GuardsMayEndInAnyOrder) {
  test::ranks(2, [](const ProcessGroup& group) {
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      PlainNet plain;
      std::optional<parallel::NoSync> local;
      for (int step = 0; step < 4; ++step) {
        if (step < 2) local.emplace(model.no_sync());
        if (step == 2) local.reset();
        if (step == 3) {
          model.zero_grad();
          plain->zero_grad();
        }
        loss_of(model(batch_of(group.rank(), step))).backward();
        add_plain_gradients(plain, 2, step);
        if (step >= 2) expect_gradients(model, plain);
      }
    });
  });
}

// What no_sync has left is no part of the next step after zero_grad.
TEST(NoSyncTest, ZeroGradResetsWhatWaits) {
  test::ranks(2, [](const ProcessGroup& group) {
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      PlainNet plain;
      for (int step = 0; step < 2; ++step) {
        loss_of(model(batch_of(group.rank(), 7))).backward();
        {
          const auto local = model.no_sync();
          loss_of(model(batch_of(group.rank(), 8))).backward();
        }
        model.zero_grad();
        for (const at::Tensor& each : model.parameters()) EXPECT_FALSE(each.grad().defined());
      }
      loss_of(model(batch_of(group.rank()))).backward();
      add_plain_gradients(plain, 2);
      expect_gradients(model, plain);
    });
  });
}

// Shards get their gradients in the backward outside.
TEST(NoSyncTest, GradientsOfShardsHaveNoNormYet) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      SCOPED_TRACE(parallel::to_string(strategy));
      ParallelModel model(UnitNet(), group, {.strategy = strategy});
      PlainNet plain;
      {
        const auto local = model.no_sync();
        loss_of(model(batch_of(group.rank()))).backward();
        EXPECT_THROW(model.gradient_norm(), c10::ValueError);
        EXPECT_THROW(parallel::clip_grad_norm_(model, 0.1), c10::ValueError);
      }
      loss_of(model(batch_of(group.rank(), 1))).backward();
      add_plain_gradients(plain, 2);
      add_plain_gradients(plain, 2, 1);
      const double norm = torch::nn::utils::clip_grad_norm_(trained(plain), 0.1);
      EXPECT_NEAR(parallel::clip_grad_norm_(model, 0.1), norm, kBound * norm);
      expect_gradients(model, plain);
    }
  });
}

// As in PyTorch; training that averages parameters now and then needs it.
TEST(NoSyncTest, AReplicaClipsItsOwnGradients) {
  test::ranks(2, [](const ProcessGroup& group) {
    ParallelModel model(UnitNet(), group, {.strategy = Strategy::kDdp});
    PlainNet alone;
    const auto local = model.no_sync();
    loss_of(model(batch_of(group.rank()))).backward();
    loss_of(alone->forward(batch_of(group.rank()))).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(trained(alone), 0.1);
    EXPECT_NEAR(model.gradient_norm(), norm, kBound * norm);
    EXPECT_NEAR(parallel::clip_grad_norm_(model, 0.1), norm, kBound * norm);
    expect_gradients(model, alone);
  });
}

TEST(ClipGradTest, ByNormIsThatOfOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for_each_strategy(group, [&](auto make) {
        for (const double max_norm : {0.1, 1e6}) {
          PlainNet plain;
          add_plain_gradients(plain, group.size());
          const double norm = torch::nn::utils::clip_grad_norm_(trained(plain), max_norm);
          auto model = make();
          loss_of(model(batch_of(group.rank()))).backward();
          EXPECT_NEAR(model.gradient_norm(), norm, kBound * norm);
          EXPECT_NEAR(parallel::clip_grad_norm_(model, max_norm), norm, kBound * norm);
          expect_gradients(model, plain);
        }
      });
    });
  }
}

TEST(ClipGradTest, ByValueIsThatOfOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for_each_strategy(group, [&](auto make) {
        PlainNet plain;
        add_plain_gradients(plain, group.size());
        torch::nn::utils::clip_grad_value_(trained(plain), 0.05);
        auto model = make();
        loss_of(model(batch_of(group.rank()))).backward();
        parallel::clip_grad_value_(model, 0.05);
        expect_gradients(model, plain);
      });
    });
  }
}

torch::nn::Embedding embedding_of(bool sparse) {
  torch::nn::Embedding made(torch::nn::EmbeddingOptions(9, 4).sparse(sparse));
  made->to(at::kDouble);
  made->weight.set_data(at::arange(36, at::kDouble).view({9, 4}) / 10);
  return made;
}

// Ids that one rank has twice, and that several have. Of several ranks the last has none.
at::Tensor ids_of(int rank, int world_size) {
  if (rank > 0 && rank == world_size - 1) return at::empty({0}, at::kLong);
  return at::tensor({3 + rank, 4, 3 + rank, 7});
}

void expect_sparse_clipped_as_dense(const ProcessGroup& group) {
  const int size = group.size();
  const auto loss = [&](auto& model, int rank) { return model(ids_of(rank, size)).pow(2).sum(); };
  for (const bool clip_norm : {true, false}) {
    torch::nn::Embedding dense = embedding_of(false), sparse = embedding_of(true);
    for (int rank = 0; rank < size; ++rank) (loss(dense, rank) / size).backward();
    DistributedDataParallel ddp(sparse, group);
    loss(ddp, group.rank()).backward();
    ASSERT_TRUE(sparse->weight.grad().is_sparse());
    if (clip_norm) {
      const double norm = torch::nn::utils::clip_grad_norm_(dense->weight, 0.1);
      EXPECT_NEAR(parallel::clip_grad_norm_(ddp, 0.1), norm, kBound * norm);
    } else {
      torch::nn::utils::clip_grad_value_(dense->weight, 3);
      parallel::clip_grad_value_(ddp, 3);
    }
    EXPECT_TRUE(at::allclose(sparse->weight.grad().to_dense(), dense->weight.grad(), 0, kBound));
  }
}

TEST(ClipGradTest, SparseGradientsAreClippedAsDenseOnes) {
  for (const int world_size : {2, 3, 4}) test::ranks(world_size, expect_sparse_clipped_as_dense);
}

TEST(ClipGradTest, SparseGradientsAreClippedAsDenseOnesOfOneRank) {
  expect_sparse_clipped_as_dense(ProcessGroup(comm::RankInfo{}));
}

TEST(ClipGradTest, SparseGradientsWithoutRowsOrWithNan) {
  test::ranks(2, [](const ProcessGroup& group) {
    torch::nn::Embedding sparse = embedding_of(true);
    DistributedDataParallel ddp(sparse, group);
    ddp(at::empty({0}, at::kLong)).sum().backward();
    EXPECT_EQ(parallel::clip_grad_norm_(ddp, 0.1), 0);
    parallel::clip_grad_value_(ddp, 3);
    EXPECT_EQ(sparse->weight.grad().coalesce().values().size(0), 0);

    sparse->weight.mutable_grad().reset();
    const double factor = group.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
    (ddp(at::tensor({2, 5})) * factor).sum().backward();
    EXPECT_TRUE(std::isnan(parallel::clip_grad_norm_(ddp, 1)));
    EXPECT_TRUE(sparse->weight.grad().coalesce().values().isnan().all().item<bool>());
  });
}

// One rank's number makes everybody's norm what it is.
TEST(ClipGradTest, ANormThatIsNotFiniteIsAnErrorOnRequest) {
  test::ranks(2, [](const ProcessGroup& group) {
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      const at::Tensor x =
          batch_of(0) * (group.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1);
      loss_of(model(x)).backward();
      const std::string text = message_of<c10::Error>(
          [&] { parallel::clip_grad_norm_(model, 1, {.error_if_nonfinite = true}); });
      EXPECT_NE(text.find("as error_if_nonfinite is set"), std::string::npos) << text;
      EXPECT_TRUE(std::isnan(parallel::clip_grad_norm_(model, 1)));
      for (const at::Tensor& each : model.parameters())
        EXPECT_TRUE(each.grad().isnan().all().template item<bool>());
      EXPECT_THROW(parallel::clip_grad_norm_(model, -1), c10::ValueError);
      EXPECT_THROW(parallel::clip_grad_value_(model, -1), c10::ValueError);
    });
  });
}

TEST(ClipGradTest, IgnoredParametersNeitherCountNorChange) {
  test::ranks(2, [](const ProcessGroup& group) {
    PlainNet plain;
    add_plain_gradients(plain, 2);
    plain->half->weight.mutable_grad().reset();
    const double norm = torch::nn::utils::clip_grad_norm_(trained(plain), 0.1);
    PlainNet net;
    DistributedDataParallel ddp(net, group, {.ignored = {"half.weight"}});
    FullyShardedDataParallel sharded(PlainNet(), group, {.ignored = {"half"}});
    loss_of(ddp(batch_of(group.rank()))).backward();
    loss_of(sharded(batch_of(group.rank()))).backward();
    const at::Tensor before = net->half->weight.grad().clone();
    EXPECT_NEAR(parallel::clip_grad_norm_(ddp, 0.1), norm, kBound * norm);
    EXPECT_NEAR(parallel::clip_grad_norm_(sharded, 0.1), norm, kBound * norm);
    EXPECT_TRUE(net->half->weight.grad().equal(before));
    EXPECT_EQ(ddp.parameters().size(), 7U) << "an optimizer of the wrapper's parameters has them";
  });
}

TEST(ModelWrapperTest, AnOptimizerOfItsParametersTrainsAsOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for_each_strategy(group, [&](auto make) {
        PlainNet plain;
        torch::optim::AdamW expected(trained(plain), 1e-2);
        auto model = make();
        torch::optim::AdamW optimizer(model.parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          add_plain_gradients(plain, group.size(), step);
          loss_of(model(batch_of(group.rank(), step))).backward();
          torch::nn::utils::clip_grad_norm_(trained(plain), 0.5);
          parallel::clip_grad_norm_(model, 0.5);
          for (auto* each : {&expected, &optimizer}) {
            each->step();
            each->zero_grad();
          }
        }
        expect_whole(model, plain);
        for (const auto& [name, tensor] : model.named_parameters()) {
          EXPECT_TRUE(tensor.requires_grad()) << name;
          EXPECT_EQ(name.find("frozen"), std::string::npos) << name;
        }
      });
    });
  }
}

TEST(ModelWrapperTest, WhatIsWrittenWithWriteBackStays) {
  test::ranks(2, [](const ProcessGroup& group) {
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      {
        const auto whole = model.unsharded({.write_back = true});
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : model->parameters()) each.fill_(0.25);
      }
      const auto whole = model.unsharded();
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(item.value().eq(0.25).all().template item<bool>()) << item.key();
    });
  });
}

TEST(ModelWrapperTest, AWholeModuleIsSavedAndReadByAPlainOne) {
  test::ranks(2, [](const ProcessGroup& group) {
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      std::stringstream bytes;
      {
        auto whole = model.unsharded();
        torch::save(model.module(), bytes);
      }
      PlainNet loaded, expected;
      for (auto& each : loaded->parameters()) each.detach().zero_();
      torch::load(loaded, bytes);
      const auto other = expected->named_parameters();
      for (const auto& item : loaded->named_parameters())
        EXPECT_TRUE(item.value().equal(other[item.key()])) << item.key();
    });
  });
}

// One loop for a module and for any wrapper of it.
template <class Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer, int rank) {
  model->train();
  optimizer.zero_grad();
  const at::Tensor loss = loss_of(model(batch_of(rank)));
  loss.backward();
  optimizer.step();
  return loss.template item<double>();
}

TEST(ParallelModelTest, MixedPrecisionHoldsUnderEveryStrategyOrIsRefused) {
  test::ranks(2, [](const ProcessGroup& group) {
    const parallel::MixedPrecision single{.param_dtype = at::kFloat};
    const auto type_under = [&](const parallel::StrategyOptions& options) {
      return ParallelModel(PlainNet(), group, options)(batch_of(group.rank())).scalar_type();
    };
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      const bool is_ddp = strategy == Strategy::kDdp;
      EXPECT_EQ(type_under({.strategy = strategy, .mixed_precision = single}), at::kFloat);
      EXPECT_EQ(type_under({.strategy = strategy}), at::kDouble);
      parallel::StrategyOptions own{.strategy = strategy}, other{.strategy = strategy};
      (is_ddp ? own.ddp.mixed_precision : own.sharding.mixed_precision) = single;
      (is_ddp ? other.sharding.mixed_precision : other.ddp.mixed_precision) = single;
      EXPECT_EQ(type_under(own), at::kFloat);
      const std::string refused = message_of<c10::ValueError>([&] { type_under(other); });
      EXPECT_TRUE(refused.starts_with("strategy " + parallel::to_string(strategy) +
                                      ": expected the mixed_precision that all strategies read"))
          << refused;
    }
  });
}

// A strategy that is chosen on the command line must not change what is trained.
TEST(ParallelModelTest, OptionsOfTheOtherWrapperAloneAreRefused) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto refusal = [&](const parallel::StrategyOptions& options) {
      return message_of<c10::ValueError>([&] { ParallelModel(PlainNet(), group, options); });
    };
    const std::string bias = PlainNet()->named_parameters().keys().back();
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero3}) {
      const bool is_ddp = strategy == Strategy::kDdp;
      const std::string begin = "strategy " + parallel::to_string(strategy) + ": expected ";
      parallel::StrategyOptions options{.strategy = strategy};
      (is_ddp ? options.sharding.ignored : options.ddp.ignored) = {bias};
      EXPECT_EQ(refusal(options), begin + "`ignored` in both members, got it in " +
                                      (is_ddp ? "sharding" : "ddp") +
                                      " alone, which this strategy does not read");
      (is_ddp ? options.ddp.ignored : options.sharding.ignored) = {bias};
      EXPECT_EQ(refusal(options), "nothing was thrown");
      options.ddp.tensor_parallel = parallel::TensorParallelPlan();
      EXPECT_EQ(refusal(options), begin +
                                      "the tensor_parallel of StrategyOptions, which all "
                                      "strategies read, got that of its member ddp");
    }
  });
}

int64_t count_modules(torch::nn::Module& module) {
  return std::ssize(module.modules());
}

TEST(ModelWrapperTest, WrappersMoveLieInVectorsAndAreReturnedByValue) {
  test::ranks(2, [](const ProcessGroup& group) {
    static_assert(std::is_nothrow_move_constructible_v<DistributedDataParallel<PlainNet>>);
    static_assert(std::is_nothrow_move_constructible_v<FullyShardedDataParallel<PlainNet>>);
    static_assert(std::is_nothrow_move_constructible_v<ParallelModel<PlainNet>>);
    static_assert(!std::is_copy_constructible_v<DistributedDataParallel<PlainNet>>);
    static_assert(!parallel::ModuleHolder<PlainNetImpl>, "a module by value would be a copy");
    PlainNet plain;
    torch::optim::AdamW plain_optimizer(trained(plain), 1e-2);
    add_plain_gradients(plain, 2);
    plain_optimizer.step();
    for_each_strategy(group, [&](auto make) {
      using Model = decltype(make());
      std::vector<Model> models;
      std::vector<torch::optim::AdamW> optimizers;
      for (int i = 0; i < 4; ++i) {
        models.push_back(make());
        optimizers.emplace_back(models.back().parameters(), 1e-2);
      }
      // Between a forward and its backward, too.
      const at::Tensor loss = loss_of(models.front()(batch_of(group.rank())));
      Model moved = std::move(models.front());
      loss.backward();
      optimizers.front().step();
      expect_whole(moved, plain);
      for (const std::function<void()>& use :
           {std::function<void()>([&] { models.front()(batch_of(0)); }),
            std::function<void()>([&] { models.front()->train(); }),
            std::function<void()>([&] { models.front().parameters(); }),
            std::function<void()>([&] { auto guard = models.front().no_sync(); })}) {
        const std::string text = message_of<c10::ValueError>(use);
        EXPECT_NE(text.find("after it was moved from"), std::string::npos) << text;
      }
      models.front() = std::move(models.back());
      train_step(models.front(), optimizers.back(), group.rank());
      expect_whole(models.front(), plain);
      EXPECT_EQ(count_modules(moved), count_modules(*plain));
    });
  });
}

TEST(ModelWrapperTest, ASharedPointerIsAHolderAndAnEmptyHolderIsRefused) {
  ProcessGroup alone(comm::RankInfo{});
  DistributedDataParallel ddp(std::make_shared<PlainNetImpl>(), alone,
                              {.gradient_as_bucket_view = true});
  static_assert(
      std::is_same_v<decltype(ddp), DistributedDataParallel<std::shared_ptr<PlainNetImpl>>>);
  FullyShardedDataParallel sharded(std::make_shared<PlainNetImpl>(), alone,
                                   {.shard = Shard::kGradients});
  for (const at::Tensor& loss : {loss_of(ddp(batch_of(0))), loss_of(sharded(batch_of(0)))})
    loss.backward();
  EXPECT_NEAR(ddp.gradient_norm(), sharded.gradient_norm(), kBound);
  EXPECT_EQ((*ddp).parameters().size(), ddp.module()->parameters().size());
  const std::string text =
      message_of<c10::ValueError>([&] { DistributedDataParallel(PlainNet(nullptr), alone); });
  EXPECT_NE(text.find("got an empty holder"), std::string::npos) << text;
}

TEST(ModelWrapperTest, AWrapperOutlivesItsHolderAndItsGroupsName) {
  test::ranks(2, [](const ProcessGroup& group) {
    PlainNet plain;
    add_plain_gradients(plain, 2);
    const auto make = [&](Strategy strategy) {
      ProcessGroup copy = group;
      PlainNet net;
      return ParallelModel(net, copy, {.strategy = strategy});
    };
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero3}) {
      auto model = make(strategy);
      loss_of(model(batch_of(group.rank()))).backward();
      expect_gradients(model, plain);
    }
  });
}

// Gradients of the input alone are none of the ranks' business, and the parameters' may follow.
TEST(ModelWrapperTest, GradientsOfInputsAloneMayComeBeforeTheBackward) {
  test::ranks(2, [](const ProcessGroup& group) {
    PlainNet plain;
    add_plain_gradients(plain, 2);
    for_each_strategy(group, [&](auto make) {
      auto model = make();
      const at::Tensor x = batch_of(group.rank()).requires_grad_(true);
      const at::Tensor loss = loss_of(model(x));
      const auto found = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
      EXPECT_TRUE(found[0].abs().sum().template item<double>() > 0);
      loss.backward();
      expect_gradients(model, plain);
    });
  });
}

TEST(UnitTest, NamesAndResultsAreThoseOfAModelWithoutUnits) {
  PlainNet plain;
  UnitNet units;
  EXPECT_EQ(units->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_TRUE(units->blocks[0]->as<Block>() != nullptr);
  EXPECT_TRUE(units->forward(batch_of(0)).equal(plain->forward(batch_of(0))));
}

TEST(UnitTest, AShardedModelFindsItsUnitsAndTrainsAsOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      PlainNet plain;
      add_plain_gradients(plain, group.size());
      for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
        UnitNet net;
        FullyShardedDataParallel sharded(net, group, {.shard = shard});
        EXPECT_EQ(sharded.engine().num_units(), 1 + 4);
        loss_of(sharded(batch_of(group.rank()))).backward();
        expect_gradients(sharded, plain);
        // Outside of the wrapper's forward a unit is a plain call.
        const std::string text = message_of<c10::Error>([&] { net->blocks[1](batch_of(0)); });
        EXPECT_NE(text.find("sharding: block1.linear."), std::string::npos) << text;
      }
    });
  }
}

TEST(UnitTest, ItsParametersAreThereWhileItRunsOnly) {
  test::ranks(2, [](const ProcessGroup& group) {
    struct WatcherImpl : torch::nn::Module {
      WatcherImpl() {
        first = register_module("first", Unit<Block>(3));
        second = register_module("second", Unit<Block>(3));
        to(at::kDouble);
      }
      at::Tensor forward(const at::Tensor& x) {
        const at::Tensor y = first(x);
        text = message_of<c10::Error>([&] { first->linear->weight.sum(); });
        return second(y);
      }
      Unit<Block> first{nullptr}, second{nullptr};
      std::string text;
    };
    const auto net = std::make_shared<WatcherImpl>();
    FullyShardedDataParallel sharded(net, group, {.prefetch = false});
    sharded(batch_of(0));
    EXPECT_NE(net->text.find("first.linear.weight is sharded"), std::string::npos) << net->text;
  });
}

TEST(UnitTest, SequentialRunsUnitsAndAUnitMayBeTheWholeModel) {
  test::ranks(2, [](const ProcessGroup& group) {
    torch::nn::Sequential net(Unit<torch::nn::Linear>(3, 3), Unit<torch::nn::Linear>(3, 3));
    net->to(at::kDouble);
    torch::nn::Sequential copy(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    copy->to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters())
      copy->named_parameters()[item.key()].copy_(item.value());
    FullyShardedDataParallel sharded(net, group);
    EXPECT_EQ(sharded.engine().num_units(), 1 + 2);
    for (auto& each : copy->parameters()) group.broadcast(each, 0);
    EXPECT_TRUE(sharded(batch_of(0)).equal(copy->forward<at::Tensor>(batch_of(0))));

    Unit<Block> block(3);
    block->to(at::kDouble);
    Block same(3);
    same->to(at::kDouble);
    for (const auto& item : block->named_parameters())
      same->named_parameters()[item.key()].copy_(item.value());
    FullyShardedDataParallel one(block, group);
    EXPECT_EQ(one.engine().num_units(), 1);
    for (auto& each : same->parameters()) group.broadcast(each, 0);
    EXPECT_TRUE(one(batch_of(0), 0.5).equal(same(batch_of(0), 0.5)));
  });
}

}  // namespace model_wrapper_test
}  // namespace cohort
