// SPDX-License-Identifier: Apache-2.0
// Training with sharded state against one process that holds everything.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <thread>
#include <torch/optim/sgd.h>

#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/sharding/flat_layout.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/strategy_advice.h"
#include "cohort/translate/tensor_memory.h"

#include "bench/sent_bytes.h"
#include "tests/parallel/sharding_support.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort::parallel {
namespace sharding_test {

using test::sharding::expect_plain_training;
using test::sharding::kShards;
using test::sharding::unit;

void expect_plain_training_in_all_cases(const comm::ProcessGroup& group) {
  for (const Shard shard : kShards) {
    for (const bool with_units : {true, false}) {
      expect_plain_training(group, {.options = {.shard = shard}, .with_units = with_units});
      expect_plain_training(
          group, {.options = {.shard = shard}, .with_units = with_units, .delay = 3, .clip = 0.5});
    }
    expect_plain_training(
        group,
        {.options = {.shard = shard, .prefetch = false}, .delay = 2, .synchronize_always = true});
  }
  expect_plain_training(group, {.options = {.reshard_after_forward = false}});
}

TEST(ShardingTest, TwoRanksTrainAsOneProcess) {
  test::ranks(2, expect_plain_training_in_all_cases);
}

TEST(ShardingTest, ThreeRanksTrainAsOneProcess) {
  test::ranks(3, expect_plain_training_in_all_cases);
}

TEST(ShardingTest, FourRanksTrainAsOneProcess) {
  test::ranks(4, [](const comm::ProcessGroup& group) {
    for (const Shard shard : kShards)
      expect_plain_training(group, {.options = {.shard = shard}, .delay = 2, .clip = 0.5});
  });
}

TEST(ShardingTest, OneRankTrainsAsOneProcess) {
  comm::ProcessGroup alone(comm::RankInfo{});
  expect_plain_training_in_all_cases(alone);
}

void fill_layer(const std::string& name, at::Tensor& parameter) {
  const double phase = std::stod(name) + (name.ends_with("bias") ? 0.5 : 0);
  const at::Tensor values = at::arange(parameter.numel(), at::kFloat).add(phase).sin();
  parameter.copy_(values.view(parameter.sizes()) / 4);
}

struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t width, const at::TensorOptions& options) {
    weight = register_parameter("weight", at::zeros({width, width}, options));
    bias = register_parameter("bias", at::zeros({width}, options));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::addmm(bias, x, weight)); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Layer);

// Wide enough for the vectors of every kernel, of sizes that no vector's length divides.
struct OddImpl : torch::nn::Module {
  explicit OddImpl(int64_t width, c10::Device device = c10::kCPU) {
    for (int i = 0; i < 8; ++i) {
      const at::TensorOptions options(device);
      layers.push_back(register_module(std::to_string(i), Layer(width, options)));
    }
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters())
      if (!device.is_meta()) fill_layer(item.key(), item.value());
  }
  at::Tensor forward(at::Tensor x) {
    for (Layer& layer : layers) x = x + unit(layer, x);
    return x;
  }
  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (Layer& layer : layers) all.push_back(layer.get());
    return all;
  }
  std::vector<Layer> layers;
};
TORCH_MODULE(Odd);

at::Tensor odd_batch(int rank, int step, int64_t width) {
  return at::arange(6 * width, at::kFloat).mul(1 + rank + 0.37 * step).cos().view({6, width});
}

// A sum of two has one order, and parts of a tensor are updated as the whole.
TEST(ShardingTest, OnTwoRanksEveryFloat32BitIsPlainDdps) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const int64_t width : {31, 64}) {
      Odd plain(width);
      DistributedDataParallel<Odd> ddp(plain, group);
      optim::Adam plain_adam(optim::named_parameters(*plain));
      std::vector<Odd> models;
      std::vector<FullyShardedDataParallel<Odd>> sharded;
      std::vector<optim::Adam> adams;
      for (const Shard shard : kShards) {
        models.emplace_back(width);
        sharded.emplace_back(models.back(), group, ShardingOptions{.shard = shard},
                             models.back()->units());
        adams.emplace_back(sharded.back().named_parameters());
      }
      for (int step = 0; step < 10; ++step) {
        const at::Tensor x = odd_batch(group.rank(), step, width);
        ddp(x).pow(2).sum().backward();
        plain_adam.step(1e-2);
        plain_adam.zero_grad();
        for (size_t i = 0; i < sharded.size(); ++i) {
          sharded[i](x).pow(2).sum().backward();
          adams[i].step(1e-2);
          adams[i].zero_grad();
        }
      }
      const auto expected = plain->named_parameters();
      for (size_t i = 0; i < sharded.size(); ++i) {
        const auto whole = sharded[i].unsharded();
        for (const auto& item : models[i]->named_parameters())
          EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key() << ", ZeRO " << i + 1;
      }
    }
  });
}

TEST(ShardingTest, AForwardSeesWhatWasWrittenIntoLocalShardsAfterOneWithoutABackward) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Odd model(31);
      FullyShardedDataParallel<Odd> sharded(model, group, {.shard = shard}, model->units());
      const at::Tensor x = odd_batch(0, 0, 31);
      for (int i = 0; i < 2; ++i) sharded(x);
      {
        const at::NoGradGuard no_grad;
        for (const LocalShard& local_shard : sharded.local_shards())
          at::Tensor(local_shard.tensor).zero_();
      }
      EXPECT_TRUE(sharded(x).equal(x)) << static_cast<int>(shard);
    }
  });
}

TEST(ShardingTest, AfterABackwardThatThrewTheNextOneIsRight) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Odd model(31);
      Odd calm(31);
      FullyShardedDataParallel<Odd> sharded(model, group, {.shard = shard}, model->units());
      FullyShardedDataParallel<Odd> expected(calm, group, {.shard = shard}, calm->units());
      const at::Tensor x = odd_batch(group.rank(), 0, 31);
      // Other layers' gradients have been sent, the second's are under way.
      bool throws = true;
      model->layers[0]->weight.register_hook([&](const at::Tensor&) {
        if (throws) throw std::runtime_error("once");
      });
      EXPECT_THROW(sharded(x).pow(2).sum().backward(), std::runtime_error);
      throws = false;
      for (const LocalShard& local_shard : sharded.local_shards())
        local_shard.tensor.mutable_grad().reset();
      sharded(x).pow(2).sum().backward();
      expected(x).pow(2).sum().backward();
      for (size_t i = 0; i < sharded.local_shards().size(); ++i) {
        const at::Tensor& gradient = sharded.local_shards()[i].tensor.grad();
        EXPECT_TRUE(gradient.equal(expected.local_shards()[i].tensor.grad()))
            << sharded.local_shards()[i].name;
      }
    }
  });
}

// Rank 1 takes part in no reduction before rank 0 computes the third bucket's gradients, of which
// `reached` tells.
void expect_two_travel(const comm::ProcessGroup& group, const ShardingOptions& options,
                       const std::filesystem::path& reached) {
  Odd model(31);
  FullyShardedDataParallel<Odd> sharded(model, group, options, model->units());
  if (group.rank() == 0)
    model->layers[5]->weight.register_hook([&](const at::Tensor&) { std::ofstream{reached}; });
  const at::Tensor loss = sharded(odd_batch(group.rank(), 0, 31)).pow(2).sum();
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (group.rank() == 1 && !std::filesystem::exists(reached)) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit) << reached;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  loss.backward();
}

TEST(ShardingTest, BackwardGoesOnWhileTwoBucketsTravel) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    expect_two_travel(group, {.shard = Shard::kOptimizer}, folder / "zero1");
    expect_two_travel(group, {.shard = Shard::kGradients}, folder / "zero2");
    // Units that stay are not gathered in backward.
    expect_two_travel(group, {.reshard_after_forward = false}, folder / "zero3");
  });
}

// As a checkpoint fills them: every rank its own shards.
TEST(ShardingTest, FrozenParametersThatWereFilledReachAllRanks) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Odd model(31);
      for (size_t i = 0; i < 4; ++i)
        for (const at::Tensor& each : model->layers[i]->parameters()) each.set_requires_grad(false);
      FullyShardedDataParallel<Odd> sharded(model, group, {.shard = shard}, model->units());
      const at::NoGradGuard no_grad;
      const at::Tensor x = odd_batch(0, 0, 31);
      sharded(x);
      for (const LocalShard& local_shard : sharded.local_shards()) local_shard.tensor.fill_(0.01);
      Odd expected(31);
      for (const at::Tensor& each : expected->parameters()) each.fill_(0.01);
      EXPECT_TRUE(sharded(x).equal(expected->forward(x)));
      const at::AutoGradMode grad(true);
      model->layers[0]->weight.set_requires_grad(true);
      EXPECT_THROW(sharded(x), c10::ValueError) << "one that was frozen";
    }
  });
}

// Bytes a parameter, in float32 under Adam, beside sharding_engine.h's; a unit is the 8th part.
void expect_bytes(const comm::ProcessGroup& group) {
  constexpr int64_t kWidth = 512;
  constexpr double kUnit = 4.0 / 8;
  constexpr double kActivations = 0.3;  // 6 rows, of 512
  const double ranks = group.size();
  struct Expected {
    Shard shard;
    double rest, peak;
  };
  // Of the bucket whose gradients travel: themselves, autograd's and what the others send. Under
  // the first two, of another one: themselves and what the others send.
  const double another = kUnit + kUnit * (ranks - 1) / ranks;
  const double travelling = kUnit + another;
  for (const auto& [shard, rest, peak] :
       {Expected{Shard::kOptimizer, 4 + 8 / ranks,
                 8 + 8 / ranks + travelling + another - 2 * kUnit},
        Expected{Shard::kGradients, 4 + 8 / ranks, 4 + 12 / ranks + travelling + another},
        Expected{Shard::kParameters, 12 / ranks, 16 / ranks + 2 * kUnit + travelling}}) {
    SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)));
    translate::TensorMemory memory;
    Odd model(kWidth, at::kMeta);  // so that nothing is copied from rank to rank before
    double parameters = 0;
    for (const at::Tensor& each : model->parameters())
      parameters += static_cast<double>(each.numel());
    FullyShardedDataParallel<Odd> sharded(model, group, {.shard = shard, .fill = fill_layer},
                                          model->units());
    optim::Adam adam(sharded.named_parameters());
    memory.reset_peak();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = odd_batch(group.rank(), step, kWidth);
      sharded(x).pow(2).sum().backward();
      adam.step(1e-3);
      adam.zero_grad();
    }
    EXPECT_NEAR(static_cast<double>(memory.now()) / parameters, rest, 0.05 * rest);
    EXPECT_LE(static_cast<double>(memory.peak()) / parameters, 1.02 * peak + kActivations);
  }
}

TEST(ShardingTest, TwoRanksHoldWhatTheFormulasSay) {
  test::ranks(2, expect_bytes);
}

TEST(ShardingTest, ThreeRanksHoldWhatTheFormulasSay) {
  test::ranks(3, expect_bytes);
}

TEST(ShardingTest, FourRanksHoldWhatTheFormulasSay) {
  test::ranks(4, expect_bytes);
}

// What a rank sends in a step, in units of the parameters' bytes.
void expect_sent(const comm::ProcessGroup& group) {
  constexpr int64_t kWidth = 256;
  constexpr int kSteps = 3;
  const auto advice = advise({.parameters = 1,
                              .world_size = group.size(),
                              .local_world_size = group.size(),
                              .host_memory_bytes = 1});
  for (const StrategyFit& formula : advice.strategies) {
    const Strategy strategy = parse_strategy(formula.strategy);
    // The unit that runs last is not gathered again.
    const double kept = shards_parameters(strategy) ? 1.0 / 8 : 0;
    Odd model(kWidth);
    double bytes = 0;
    for (const at::Tensor& each : model->parameters()) bytes += static_cast<double>(each.nbytes());
    ParallelModel<Odd> parallel(model, group, {.strategy = strategy}, model->units());
    optim::Adam adam(parallel.named_parameters());
    int64_t before = 0;
    for (int step = 0; step < 2 + kSteps; ++step) {
      if (step == 2) before = bench::tcp_bytes_sent(group.rank_info().master_port);
      const at::Tensor x = odd_batch(group.rank(), step, kWidth);
      parallel(x).pow(2).sum().backward();
      adam.step(1e-3);
      adam.zero_grad();
    }
    const int64_t sent = bench::tcp_bytes_sent(group.rank_info().master_port) - before;
    group.barrier("bytes counted");  // A rank that has ended closes its connections.
    // Gloo's headers, padding and all-reduces of one number are the rest.
    EXPECT_NEAR(static_cast<double>(sent) / kSteps / bytes,
                formula.sent - kept * (group.size() - 1) / group.size(), 0.005)
        << formula.strategy;
  }
}

TEST(ShardingTest, TwoRanksSendWhatTheFormulasSay) {
  test::ranks(2, expect_sent, {.backend = "gloo"});
}

TEST(ShardingTest, ThreeRanksSendWhatTheFormulasSay) {
  test::ranks(3, expect_sent, {.backend = "gloo"});
}

// Its zero_grad detaches gradients in place.
TEST(ShardingTest, LibtorchsOptimizersTrainLocalShards) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto loss_of = [](const at::Tensor& y) { return y.square().mean(); };
    const at::Tensor x = at::linspace(-1, 1, 4 * 12).view({4, 12});
    Odd plain(12);
    torch::optim::SGD plain_sgd(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (const Shard shard : kShards) {
      Odd model(12);
      FullyShardedDataParallel<Odd> sharded(model, group, {.shard = shard}, model->units());
      std::vector<at::Tensor> shards;
      for (const LocalShard& local_shard : sharded.local_shards())
        shards.push_back(local_shard.tensor);
      torch::optim::SGD sgd(shards, torch::optim::SGDOptions(0.1).momentum(0.9));
      at::Tensor loss;
      for (int step = 0; step < 3; ++step) {
        loss = loss_of(sharded(x));
        if (shard == Shard::kOptimizer) {
          plain_sgd.zero_grad();
          loss_of(plain->forward(x)).backward();
          plain_sgd.step();
        }
        sgd.zero_grad();
        loss.backward();
        sgd.step();
      }
      const at::NoGradGuard no_grad;
      EXPECT_NEAR(loss_of(sharded(x)).item<double>(), loss_of(plain->forward(x)).item<double>(),
                  1e-6);
    }
  });
}

TEST(FlatLayoutTest, ShardsHoldEveryElementOnceAndDifferByPaddingAlone) {
  for (const int64_t alignment : {1, 4}) {
    for (int shards = 1; shards <= 9; ++shards) {
      const FlatLayout layout({{.name = "a", .shape = {3, 2}, .numel = 6},
                               {.name = "b", .shape = {}, .numel = 1},
                               {.name = "c", .shape = {0}, .numel = 0},
                               {.name = "d", .shape = {11}, .numel = 11}},
                              shards, alignment);
      EXPECT_EQ(layout.numel(), 18);
      EXPECT_EQ(layout.shard_numel() % alignment, 0);
      EXPECT_LT(layout.padded_numel() - layout.numel(), alignment * shards + 3 * alignment);
      std::vector<int> places(static_cast<size_t>(layout.padded_numel()), 0);
      for (const auto& [begin, end] : layout.gaps())
        for (int64_t k = begin; k < end; ++k) ++places[static_cast<size_t>(k)];
      for (int rank = 0; rank < shards; ++rank) {
        for (const FlatSlice& slice : layout.slices(rank)) {
          const FlatTensor& tensor = layout.tensors()[slice.tensor];
          EXPECT_EQ(tensor.begin % alignment, 0);
          EXPECT_LE(slice.offset + slice.end - slice.begin, layout.shard_numel());
          EXPECT_EQ(rank * layout.shard_numel() + slice.offset, tensor.begin + slice.begin);
          for (int64_t k = slice.begin; k < slice.end; ++k)
            ++places[static_cast<size_t>(tensor.begin + k)];
        }
      }
      for (const int count : places) EXPECT_EQ(count, 1);
    }
  }
}

}  // namespace sharding_test
}  // namespace cohort::parallel
