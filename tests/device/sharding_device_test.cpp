// SPDX-License-Identifier: Apache-2.0
// Sharded training on a device whose memory the host may not touch: the bits of the CPU, and no
// step waits for the device but one whose optimizer runs on the host.
#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/device/same_bits.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace sharding_device_test {

using comm::ProcessGroup;
using parallel::FullyShardedDataParallel;
using parallel::LocalShard;
using parallel::Shard;
using parallel::ShardingOptions;
using test::Results;

constexpr Shard kShards[] = {Shard::kOptimizer, Shard::kGradients, Shard::kParameters};

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (!recomputes) return x + down(at::gelu(up(x)));
    return parallel::activation_checkpoint(
        parallel::ActivationCheckpointOptions{},
        [this](const at::Tensor& y) {
          return y + down(at::dropout(at::gelu(up(y)), 0.5, /*train=*/true));
        },
        x);
  }
  bool recomputes = false;  // in backward, and draws random numbers
  torch::nn::Linear up = register_module("up", torch::nn::Linear(8, 20));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(20, 8));
};
TORCH_MODULE(Block);

// With a buffer, a frozen parameter, and one that nobody uses.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), parallel::Unit<Block>()));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first(x) * scale;
    for (auto& block : blocks) y = block(y);
    return y * frozen;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 8));
  std::vector<parallel::Unit<Block>> blocks;
  at::Tensor scale = register_buffer("scale", at::full({8}, 1.5));
  at::Tensor unused = register_parameter("unused", at::ones({5}));
  at::Tensor frozen =
      register_parameter("frozen", at::linspace(0.5, 1, 8), /*requires_grad=*/false);
};
TORCH_MODULE(Net);

struct Case {
  ShardingOptions options;
  int delay = 1;     // batches a step, all but the last within no_sync
  int replicas = 1;  // along "dp_replicate"
  bool from_meta = false;
  bool recomputes = false;
};

at::Tensor batch_of(int rank, int number) {
  return at::arange(30, at::kFloat).mul(1 + rank + 0.3 * number).cos().view({5, 6});
}

// Takes the values from the model, whose tensors are on the meta device then.
std::function<void(const std::string&, at::Tensor&)> to_meta(Net& net) {
  std::map<std::string, at::Tensor> values;
  const auto take = [&](const std::string& name, const at::Tensor& tensor) {
    values[name] = tensor.detach().clone();
    tensor.unsafeGetTensorImpl()->shallow_copy_from(
        at::empty(tensor.sizes(), tensor.options().device(at::kMeta)).getIntrusivePtr());
  };
  for (const auto& item : net->named_parameters()) take(item.key(), item.value());
  for (const auto& item : net->named_buffers()) take(item.key(), item.value());
  return [values](const std::string& name, at::Tensor& tensor) { tensor.copy_(values.at(name)); };
}

// Losses of three steps, then all parameters.
Results trained(const ProcessGroup& group, const Case& c) {
  torch::manual_seed(3);
  Net net;
  for (auto& block : net->blocks) block->recomputes = c.recomputes;
  ShardingOptions options = c.options;
  if (c.from_meta) {
    options.fill = to_meta(net);
    options.fill_device = group.device();
  } else {
    net->to(group.device());
  }
  using Axes = std::vector<parallel::MeshAxis>;
  const Axes axes =
      c.replicas == 1 ? Axes{{"dp", -1}} : Axes{{"dp_replicate", c.replicas}, {"dp_shard", -1}};
  FullyShardedDataParallel<Net> model(net, init_device_mesh(group, axes), options);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  Results results;
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < c.delay; ++i) {
      std::optional<parallel::NoSync> local;
      if (i + 1 < c.delay) local.emplace(model.no_sync());
      const at::Tensor x = batch_of(group.rank(), step * c.delay + i).to(group.device());
      const at::Tensor loss = model(x).to(at::kFloat).pow(2).mean();
      EXPECT_EQ(loss.device(), group.device());
      loss.backward();
      results.push_back(loss.detach());
    }
    for (const LocalShard& shard : model.local_shards()) {
      const bool on_host = options.cpu_offload || group.device().is_cpu();
      EXPECT_EQ(shard.tensor.device(), on_host ? at::kCPU : group.device()) << shard.name;
      EXPECT_EQ(shard.tensor.is_pinned(), options.cpu_offload && !group.device().is_cpu());
      EXPECT_EQ(shard.tensor.grad().defined(), shard.name != "unused" && shard.name != "frozen");
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  {
    const auto whole = model.unsharded({.write_back = true});
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.mul_(0.75);
  }
  const at::NoGradGuard no_grad;
  results.push_back(model(batch_of(0, 9).to(group.device())));
  const auto whole = model.unsharded();
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device(), group.device());
    results.push_back(parameter.detach().clone());
  }
  return results;
}

void expect_cpu_bits(const ProcessGroup& group, const ProcessGroup& cpu, const Case& c) {
  SCOPED_TRACE("shard " + std::to_string(static_cast<int>(c.options.shard)) + " offload " +
               std::to_string(c.options.cpu_offload) + " meta " + std::to_string(c.from_meta) +
               " delay " + std::to_string(c.delay));
  test::expect_same_bits(trained(group, c), trained(cpu, c));
}

TEST(ShardingDeviceTest, TwoRanksTrainWithTheBitsOfTheCpu) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(group.device(), test::second_device());
    const ProcessGroup cpu = test::on_cpu(group);
    const parallel::MixedPrecision low{
        .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .buffer_dtype = at::kBFloat16};
    for (const Shard shard : kShards) {
      expect_cpu_bits(group, cpu, {.options = {.shard = shard}});
      expect_cpu_bits(group, cpu, {.options = {.shard = shard}, .delay = 2});
      expect_cpu_bits(group, cpu, {.options = {.shard = shard}, .from_meta = true});
      expect_cpu_bits(group, cpu, {.options = {.shard = shard, .mixed_precision = low}});
      expect_cpu_bits(group, cpu, {.options = {.shard = shard, .cpu_offload = true}});
      expect_cpu_bits(group, cpu,
                      {.options = {.shard = shard, .mixed_precision = low, .cpu_offload = true},
                       .delay = 2,
                       .from_meta = true});
    }
    expect_cpu_bits(group, cpu, {.options = {.reshard_after_forward = false, .prefetch = false}});
    expect_cpu_bits(group, cpu, {.options = {.cpu_offload = true}, .replicas = 2});
    expect_cpu_bits(group, cpu, {.options = {}, .recomputes = true});
  });
}

TEST(ShardingDeviceTest, OneAndThreeRanksTrainWithTheBitsOfTheCpu) {
  for (const int count : {1, 3}) {
    test::device_ranks(count, [](const ProcessGroup& group) {
      const ProcessGroup cpu = test::on_cpu(group);
      for (const Shard shard : kShards)
        expect_cpu_bits(group, cpu, {.options = {.shard = shard, .cpu_offload = true}});
      expect_cpu_bits(group, cpu, {.options = {}});
    });
  }
}

TEST(ShardingDeviceTest, FourRanksKeepUnitsAmongNeighboursAndReplicas) {
  test::device_ranks(4, [](const ProcessGroup& group) {
    const ProcessGroup cpu = test::on_cpu(group);
    expect_cpu_bits(group, cpu, {.options = {.reshard_ranks = 2}});
    expect_cpu_bits(group, cpu, {.options = {.cpu_offload = true}, .replicas = 2});
  });
}

// The numbers of docs/sharding.md. The model has three buckets of trained parameters and one of
// frozen ones, which ZeRO-1 and 2 do not gather again. ZeRO-3 gathers all in forward, and in
// backward those of the unit that is neither the whole model nor what ran last.
TEST(ShardingDeviceTest, AStepWaitsForTheDeviceOnlyWhereTheOptimizerIsOnTheHost) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    for (const Shard shard : kShards) {
      for (const bool offload : {false, true}) {
        SCOPED_TRACE("shard " + std::to_string(static_cast<int>(shard)) + " offload " +
                     std::to_string(offload));
        Net net;
        net->to(group.device());
        FullyShardedDataParallel<Net> model(net, group, {.shard = shard, .cpu_offload = offload});
        torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
        test::DeviceCounts passes, steps;
        int64_t new_blocks =
            1;  // The least: a collective's thread may give one back a moment late.
        for (int step = 0; step < 6; ++step) {
          test::reset_device_counts();
          model(batch_of(group.rank(), step).to(group.device())).pow(2).mean().backward();
          passes = test::device_counts();
          optimizer.step();
          optimizer.zero_grad();
          steps = test::device_counts();
          if (step > 1) new_blocks = std::min<int64_t>(new_blocks, steps.new_blocks);
        }
        const int64_t gathers = shard == Shard::kParameters ? 5 : 3;
        EXPECT_EQ(passes.synchronisations, offload ? 1 : 0);
        EXPECT_EQ(passes.host_to_device, 1 + (offload ? gathers : 0)) << "one is the batch";
        EXPECT_EQ(passes.device_to_host, offload ? 3 : 0);
        EXPECT_EQ(steps.synchronisations, passes.synchronisations);
        EXPECT_EQ(new_blocks, 0);
      }
    }
  });
}

// Every group has Gloo for tensors of the CPU, so nothing else would say it.
TEST(ShardingDeviceTest, AModelWhereTheGroupDoesNotComputeIsRefused) {
  test::device_ranks(1, [](const ProcessGroup& group) {
    const auto expect_refusal = [](const std::string& text, const Net& net, const ProcessGroup& of,
                                   const ShardingOptions& options) {
      const std::string refusal = test::message_of<c10::ValueError>(
          [&] { FullyShardedDataParallel<Net> model(net, of, options); });
      EXPECT_NE(refusal.find(text), std::string::npos) << refusal;
    };
    Net net;
    expect_refusal("parameter unused is on the CPU, which the group's backend", net, group, {});
    net->to(group.device());
    expect_refusal("parameter unused is on mtia:0, which the group's backend gloo does not serve",
                   net, test::on_cpu(group), {});
    Net deferred;
    const auto fill = to_meta(deferred);
    expect_refusal("expected a fill_device that the group's backend serves, mtia:0, got cpu",
                   deferred, group, {.fill = fill});
  });
}

}  // namespace sharding_device_test
}  // namespace cohort
