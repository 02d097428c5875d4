// SPDX-License-Identifier: Apache-2.0
// Mixed precision, two groups of ranks, offload and models that come into being in parts.
#include <algorithm>
#include <gtest/gtest.h>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/tensor_memory.h"

#include "tests/parallel/ddp_support.h"
#include "tests/parallel/sharding_support.h"
#include "tests/support/ranks.h"
#include "tests/support/sentences.h"

namespace cohort {
namespace sharding_options_test {

using comm::ProcessGroup;
using parallel::LocalShard;
using parallel::MixedPrecision;
using test::sharding::batch_of;
using test::sharding::expect_plain_training;
using test::sharding::FullyShardedDataParallel;
using test::sharding::kShards;
using test::sharding::loss_of;
using test::sharding::Shard;
using test::sharding::ShardingOptions;
using test::sharding::Tower;
constexpr auto kLow = at::kBFloat16;

at::Tensor low_loss(const at::Tensor& output) {
  return loss_of(output.to(at::kFloat));
}

// The float32 gradients of a bfloat16 copy of `master`, summed over a rank's batches.
std::vector<at::Tensor> low_gradients(Tower& master, int rank, int step, int delay) {
  std::vector<at::Tensor> sums;
  Tower low(at::kFloat);
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < low->parameters().size(); ++i)
      low->parameters()[i].copy_(master->parameters()[i]);
    low->to(kLow);
  }
  for (int i = 0; i < delay; ++i) {
    low->zero_grad();
    low_loss(low->forward(batch_of(rank, step * delay + i).to(at::kFloat).to(kLow))).backward();
    for (size_t k = 0; k < low->parameters().size(); ++k) {
      const at::Tensor& gradient = low->parameters()[k].grad();
      if (sums.size() <= k) sums.emplace_back();
      if (!gradient.defined()) continue;
      sums[k] = sums[k].defined() ? sums[k] + gradient.to(at::kFloat) : gradient.to(at::kFloat);
    }
  }
  return sums;
}

// Descent in steps whose factor is a power of two: sums round once, whatever the instruction.
void descend(const at::Tensor& parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  parameter.add_(gradient, -1.0 / 4096);
}

// Two ranks against one process: halves are exact, and a sum of two has one order.
void expect_emulated_training(const ProcessGroup& group, const ShardingOptions& options,
                              int delay) {
  SCOPED_TRACE("shard " + std::to_string(static_cast<int>(options.shard)) + " delay " +
               std::to_string(delay));
  Tower master(at::kFloat);
  Tower model(at::kFloat);
  FullyShardedDataParallel<Tower> sharded(model, group, options, model->units());
  for (int step = 0; step < 4; ++step) {
    const auto own = low_gradients(master, 0, step, delay);
    const auto other = low_gradients(master, 1, step, delay);
    const auto travel = options.mixed_precision.reduce_dtype.value_or(at::kFloat);
    for (size_t k = 0; k < own.size(); ++k) {
      if (!own[k].defined()) continue;
      descend(master->parameters()[k],
              (own[k].mul(0.5).to(travel) + other[k].mul(0.5).to(travel)).to(at::kFloat));
    }
    for (int i = 0; i < delay; ++i) {
      std::optional<parallel::NoSync> local;
      if (i + 1 < delay) local.emplace(sharded);
      const at::Tensor output = sharded(batch_of(group.rank(), step * delay + i).to(at::kFloat));
      EXPECT_EQ(output.scalar_type(), options.mixed_precision.output_dtype.value_or(kLow));
      low_loss(output).backward();
    }
    const auto whole = master->named_parameters();
    for (const LocalShard& local_shard : sharded.local_shards()) {
      EXPECT_EQ(local_shard.tensor.scalar_type(), at::kFloat);
      if (local_shard.tensor.grad().defined())
        descend(local_shard.tensor, local_shard.tensor.grad());
      local_shard.tensor.mutable_grad().reset();
      EXPECT_TRUE(local_shard.tensor.equal(whole[local_shard.name].reshape({-1}).narrow(
          0, local_shard.begin, local_shard.end - local_shard.begin)))
          << local_shard.name << ", step " << step;
    }
  }
}

TEST(ShardingOptionsTest, LowPrecisionComputesOnFloat32MastersBitByBit) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      for (const int delay : {1, 3}) {
        const MixedPrecision types{.param_dtype = kLow};
        expect_emulated_training(group, {.shard = shard, .mixed_precision = types}, delay);
      }
      const MixedPrecision types{
          .param_dtype = kLow, .reduce_dtype = kLow, .output_dtype = at::kFloat};
      expect_emulated_training(group, {.shard = shard, .mixed_precision = types}, 1);
    }
  });
}

// Notes the types that come to it.
struct WatchImpl : torch::nn::Module {
  WatchImpl() {
    weight = register_parameter("weight", at::ones({3, 3}));
    scale = register_buffer("scale", at::ones({3}));
    count = register_buffer("count", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = {x.scalar_type(), weight.scalar_type(), scale.scalar_type(), count.scalar_type()};
    return at::matmul(x.to(weight.scalar_type()), weight) * scale.to(weight.scalar_type());
  }
  at::Tensor weight, scale, count;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Watch);

struct WatchesImpl : torch::nn::Module {
  WatchesImpl() {
    first = register_module("first", Watch());
    second = register_module("second", Watch());
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    return test::sharding::unit(second, test::sharding::unit(first, x).to(at::kDouble));
  }
  at::ScalarType seen = at::kDouble;
  Watch first{nullptr}, second{nullptr};
};
TORCH_MODULE(Watches);

TEST(ShardingOptionsTest, InputsOutputsAndBuffersComeInTheTypesAskedFor) {
  ProcessGroup alone(comm::RankInfo{});
  const at::Tensor x = at::ones({2, 3});
  Watches cast;
  FullyShardedDataParallel<Watches> casting(cast, alone,
                                            {.mixed_precision = {.param_dtype = kLow,
                                                                 .buffer_dtype = at::kHalf,
                                                                 .output_dtype = at::kDouble}},
                                            {cast->first.get(), cast->second.get()});
  EXPECT_EQ(casting(x).scalar_type(), at::kDouble);
  EXPECT_EQ(cast->seen, kLow);
  EXPECT_EQ(cast->second->seen, (std::vector{kLow, kLow, at::kHalf, at::kLong}))
      << "a unit's inputs are cast, too";

  Watches kept;
  FullyShardedDataParallel<Watches> keeping(
      kept, alone, {.mixed_precision = {.param_dtype = kLow, .cast_forward_inputs = false}},
      {kept->first.get(), kept->second.get()});
  EXPECT_EQ(keeping(x).scalar_type(), kLow);
  EXPECT_EQ(kept->seen, at::kFloat);
  EXPECT_EQ(kept->second->seen, (std::vector{at::kDouble, kLow, at::kFloat, at::kLong}));

  Watches bad;
  test::expect_error<c10::ValueError>(
      [&] {
        FullyShardedDataParallel<Watches>(bad, alone,
                                          {.mixed_precision = {.output_dtype = at::kInt}});
      },
      "mixed_precision.output_dtype: expected a floating-point type, got Int");
}

std::vector<std::string> names_of(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) names.push_back(item.key());
  return names;
}

TEST(ShardingOptionsTest, AnyForwardOrderTrainsAsOneProcess) {
  for (const int ranks : {2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      std::vector<std::string> order = names_of(*Tower());
      std::ranges::reverse(order);
      for (const Shard shard : kShards) {
        expect_plain_training(
            group, {.options = {.shard = shard, .forward_order = order}, .delay = 2, .clip = 0.5});
      }
    });
  }
}

TEST(ShardingOptionsTest, RanksWhoseOptionsDifferAreNamed) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tower model;
    ShardingOptions options;
    if (group.rank() == 1) options.shard = Shard::kGradients;
    test::expect_error<c10::ValueError>(
        [&] { FullyShardedDataParallel<Tower>(model, group, options); },
        "rank 1 has shard 1 where");
    options = {.forward_order = names_of(*model)};
    if (group.rank() == 1) std::ranges::reverse(options.forward_order);
    test::expect_error<c10::ValueError>(
        [&] { FullyShardedDataParallel<Tower>(model, group, options); },
        "rank 1 has forward_order frozen.second.bias where rank 0 has forward_order table");
  });
}

// Neighbours share the model out, ranks of equal parity hold the same shards.
DeviceMesh two_by_two(const ProcessGroup& world) {
  return init_device_mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
}

TEST(ShardingOptionsTest, TwoGroupsOfTwoRanksTrainAsOneProcess) {
  test::ranks(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh = two_by_two(world);
    for (const Shard shard : kShards) {
      expect_plain_training(world,
                            {.options = {.shard = shard}, .delay = 2, .clip = 0.5, .mesh = mesh});
    }
  });
}

TEST(ShardingOptionsTest, ReplicasStartFromTheFirstOnesValues) {
  test::ranks(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh = two_by_two(world);
    Tower model;
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.add_(world.rank());
    }
    FullyShardedDataParallel<Tower> sharded(model, mesh);
    const auto whole = sharded.unsharded();
    Tower expected;
    EXPECT_EQ(test::difference(*model, *expected), 0);
  });
}

TEST(ShardingOptionsTest, ShardsOfTheirOwnInHostMemoryTrainAsOneProcess) {
  for (const int ranks : {2, 3}) {
    test::ranks(ranks, [](const ProcessGroup& group) {
      for (const Shard shard : kShards) {
        expect_plain_training(
            group, {.options = {.shard = shard, .cpu_offload = true}, .delay = 2, .clip = 0.5});
      }
    });
  }
}

constexpr uint64_t kSeed = 11;

TEST(ShardingOptionsTest, ATransformerMadeOnMetaIsFilledPartByPart) {
  test::ranks(2, [](const ProcessGroup& group) {
    auto options = test::tiny_options();
    options.dim_emb = 64;
    options.dim_ffn = 256;
    nmt::Transformer plain(options);
    plain->initialise(kSeed);
    int64_t bytes = 0;
    int64_t largest = 0;
    for (const auto& parameter : plain->parameters()) {
      bytes += static_cast<int64_t>(parameter.nbytes());
      largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
    }
    for (const Shard shard : kShards) {
      nmt::Transformer model(options, nmt::Precision::kFloat32, at::kMeta);
      std::vector<torch::nn::Module*> layers = model->layers();
      translate::set_up_layers(model, /*gradient_checkpointing=*/false);
      std::optional<FullyShardedDataParallel<nmt::Transformer>> sharded;
      const int64_t peak = translate::peak_tensor_bytes([&] {
        sharded.emplace(model, group,
                        ShardingOptions{.shard = shard, .fill = nmt::Initialiser(options, kSeed)},
                        layers);
      });
      // And what the ranks compare: names and shapes.
      if (shard == Shard::kParameters) {
        EXPECT_LT(peak, bytes / 2 + largest + 65536);
      }
      const auto batch = test::make_test_batch(test::make_sentences(4, 3));
      model->eval();
      plain->eval();
      const at::NoGradGuard no_grad;
      const at::Tensor loss = std::get<0>((*sharded)(batch));
      EXPECT_TRUE(loss.equal(std::get<0>(plain->forward(batch))));
      const auto whole = sharded->unsharded();
      const auto expected = plain->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
    }
  });
}

// Half of it on the meta device, a buffer too.
struct DeferredImpl : torch::nn::Module {
  explicit DeferredImpl(c10::Device device) {
    const auto options = at::TensorOptions(at::kDouble).device(device);
    a = register_parameter("a", at::zeros({5, 3}, options));
    here = register_parameter("here", at::full({3}, 0.25, at::kDouble));
    b = register_parameter("b", at::zeros({3, 5}, options));
    scale = register_buffer("scale", at::zeros({5}, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(at::tanh(at::matmul(x, a) + here), b) * scale;
  }
  at::Tensor a, here, b, scale;
};
TORCH_MODULE(Deferred);

TEST(ShardingOptionsTest, DeferredParametersAndBuffersAreTrainedLikeOthers) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto train = [&](c10::Device device) {
      Deferred model(device);
      std::vector<std::string> names;
      const auto fill = [&](const std::string& name, at::Tensor& tensor) {
        names.push_back(name);
        tensor.copy_(at::arange(tensor.numel(), at::kDouble).sin().view(tensor.sizes()));
      };
      FullyShardedDataParallel<Deferred> sharded(model, group, {.fill = fill});
      if (device.is_meta()) {
        EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "scale"}));
      } else {
        EXPECT_TRUE(names.empty());
        const auto whole = sharded.unsharded({.write_back = true});
        const at::NoGradGuard no_grad;
        for (at::Tensor tensor : {model->a, model->b, model->scale})
          tensor.copy_(at::arange(tensor.numel(), at::kDouble).sin().view(tensor.sizes()));
      }
      optim::Adam adam(sharded.named_parameters());
      for (int step = 0; step < 3; ++step) {
        loss_of(sharded(batch_of(group.rank(), step))).backward();
        adam.step(1e-2);
        adam.zero_grad();
      }
      const at::NoGradGuard no_grad;
      return sharded(batch_of(0, 9));
    };
    EXPECT_TRUE(train(at::kMeta).equal(train(at::kCPU)));
    Deferred model(at::kMeta);
    test::expect_error<c10::ValueError>([&] { FullyShardedDataParallel<Deferred>(model, group); },
                                        "a is on the meta device");
  });
}

TEST(ShardingOptionsTest, EachRankKeepsItsPartOfWhatItWrote) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower model(at::kDouble);
      model->parameters().front().requires_grad_(false);
      FullyShardedDataParallel<Tower> sharded(model, group, {.shard = shard}, model->units());
      {
        const auto whole = sharded.unsharded({.write_back = true});
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : model->parameters()) each.fill_(group.rank() + 1);
      }
      const auto whole = sharded.unsharded();
      for (const auto& item : model->named_parameters()) {
        at::Tensor expected = at::zeros(item.value().numel(), at::kDouble);
        for (const LocalShard& local_shard : sharded.local_shards()) {
          if (local_shard.name == item.key())
            expected.narrow(0, local_shard.begin, local_shard.end - local_shard.begin)
                .fill_(group.rank() + 1);
        }
        group.all_reduce(expected);
        EXPECT_TRUE(item.value().detach().flatten().equal(expected))
            << item.key() << ", shard " << static_cast<int>(shard);
      }
    }
  });
}

// Training in low precision continues between them, and hooks on gradients still run.
TEST(ShardingOptionsTest, UnshardedParametersHaveTheirOwnType) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower model(at::kFloat);
      FullyShardedDataParallel<Tower> sharded(
          model, group, {.shard = shard, .mixed_precision = {.param_dtype = kLow}}, model->units());
      for (int step = 0; step < 3; ++step) {
        const bool waits = step == 1;
        {
          std::optional<parallel::NoSync> local;
          if (waits) local.emplace(sharded);
          low_loss(sharded(batch_of(group.rank(), step).to(at::kFloat))).backward();
        }
        int num_gradients = 0;
        for (const LocalShard& each : sharded.local_shards()) {
          if (!each.tensor.grad().defined()) continue;
          ++num_gradients;
          descend(each.tensor, each.tensor.grad());
          each.tensor.mutable_grad().reset();
        }
        EXPECT_EQ(num_gradients > 0, !waits) << "step " << step;
        const auto whole = sharded.unsharded({.write_back = step == 2});
        const auto parameters = model->named_parameters();
        for (const LocalShard& each : sharded.local_shards()) {
          const at::Tensor parameter = parameters[each.name];
          ASSERT_EQ(parameter.scalar_type(), at::kFloat);
          EXPECT_TRUE(parameter.flatten().slice(0, each.begin, each.end).equal(each.tensor));
        }
        const at::NoGradGuard no_grad;
        if (step == 2) model->parameters()[0].fill_(1 + 1e-5);
      }
      for (const LocalShard& each : sharded.local_shards()) {
        if (each.name != model->named_parameters().keys()[0]) continue;
        EXPECT_TRUE(each.tensor.eq(static_cast<float>(1 + 1e-5)).all().item<bool>());
      }
    }
  });
}

TEST(ShardingOptionsTest, WhatNobodyWroteKeepsItsPrecision) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      Tower model(at::kFloat);
      FullyShardedDataParallel<Tower> sharded(
          model, group, {.shard = shard, .mixed_precision = {.param_dtype = kLow}}, model->units());
      std::vector<at::Tensor> before;
      for (const LocalShard& local_shard : sharded.local_shards())
        before.push_back(local_shard.tensor.detach().clone());
      {
        const auto whole = sharded.unsharded({.write_back = true});
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : model->parameters())
          each.flatten().slice(0, 0, at::nullopt, 2).fill_(3);
      }
      const auto& shards = sharded.local_shards();
      for (size_t i = 0; i < shards.size(); ++i) {
        for (int64_t k = shards[i].begin; k < shards[i].end; ++k) {
          const auto found = shards[i].tensor[k - shards[i].begin].item<float>();
          EXPECT_EQ(found, k % 2 == 0 ? 3 : before[i][k - shards[i].begin].item<float>())
              << shards[i].name << " " << k;
        }
      }
    }
  });
}

}  // namespace sharding_options_test
}  // namespace cohort
