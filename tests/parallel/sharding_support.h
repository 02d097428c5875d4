// SPDX-License-Identifier: Apache-2.0
// A model with everything that sharding must cope with, and one process that trains it whole.
#pragma once
#include <cmath>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/support/difference.h"

namespace cohort::test::sharding {

using parallel::FullyShardedDataParallel;
using parallel::Shard;
using parallel::ShardingOptions;

/// float64; per step some hundred roundings of 1e-16 in a gradient, which Adam divides by its own
/// size: a wrong gradient moves parameters by the rate, 1e-2.
inline constexpr double kRounding = 1e-9;
inline constexpr double kRate = 1e-2;

/// Calls block->forward(arguments...) as a runner of blocks does: a unit of those that are given to
/// the wrapper's constructor.
template <class Block, class... Arguments>
auto unit(Block& block, Arguments&&... arguments) {
  const auto forward = [&](auto&&... each) {
    return block->forward(std::forward<decltype(each)>(each)...);
  };
  return parallel::run_unit(*block, forward, std::forward<Arguments>(arguments)...);
}
inline constexpr Shard kShards[] = {Shard::kOptimizer, Shard::kGradients, Shard::kParameters};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    first = register_module("first", torch::nn::Linear(width, 7));
    second = register_module("second", torch::nn::Linear(7, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Block);

// A block around a block.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int64_t width) {
    inner = register_module("inner", Block(width));
    scale = register_parameter("scale", at::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) { return unit(inner, scaled ? x * scale : x); }
  Block inner{nullptr};
  at::Tensor scale;
  bool scaled = true;
};
TORCH_MODULE(Outer);

// The head is the first layer's table again; a block runs twice; a parameter is frozen.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(at::ScalarType type = at::kDouble) {
    table = register_parameter("table", at::zeros({5, 3}));
    outer = register_module("outer", Outer(3));
    block = register_module("block", Block(3));
    frozen = register_module("frozen", Block(3));
    to(type);
    torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(phase += 1).sin().view(parameter.sizes()));
    }
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = unit(outer, at::matmul(x, table));
    y = unit(block, y);
    y = unit(frozen, y);
    y = unit(block, y);
    return at::matmul(y, table.t());
  }
  std::vector<torch::nn::Module*> units() {
    return {outer.get(), outer->inner.get(), block.get(), frozen.get()};
  }
  at::Tensor table;
  Outer outer{nullptr};
  Block block{nullptr}, frozen{nullptr};
};
TORCH_MODULE(Tower);

inline at::Tensor batch_of(int rank, int step) {
  return at::arange(20, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({4, 5});
}

inline at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

// Steps of one process on the mean of all ranks' losses over `delay` batches each.
class Plain {
 public:
  explicit Plain(int world_size) : world_size_(world_size) {}

  void step(int step, int delay, double clip) {
    model->zero_grad();
    for (int rank = 0; rank < world_size_; ++rank) {
      for (int i = 0; i < delay; ++i)
        (loss_of(model->forward(batch_of(rank, step * delay + i))) / world_size_).backward();
    }
    norm = std::sqrt(optim::gradient_norm_squared(adam_.parameters()));
    adam_.step(kRate, clip > 0 && norm > clip ? clip / norm : 1);
  }

  Tower model;
  double norm = 0;

 private:
  std::vector<std::pair<std::string, at::Tensor>> trained() {
    auto named = optim::named_parameters(*model);
    std::erase_if(named, [](const auto& each) { return !each.second.requires_grad(); });
    return named;
  }
  int world_size_;
  optim::Adam adam_{trained()};
};

/// One way to shard and to train.
struct Case {
  ShardingOptions options;
  bool with_units = true;
  int delay = 1;
  bool synchronize_always = false;  // no no_sync around the first batches
  double clip = 0;
  parallel::DeviceMesh mesh;  ///< As the constructor's; empty: all ranks share the model out.
};

/// Expects 20 steps of all ranks of `group` to be those of one process.
inline void expect_plain_training(const comm::ProcessGroup& group, const Case& c) {
  SCOPED_TRACE("shard " + std::to_string(static_cast<int>(c.options.shard)) + " units " +
               std::to_string(c.with_units) + " delay " + std::to_string(c.delay));
  Plain plain(group.size());
  Tower model;
  FullyShardedDataParallel<Tower> sharded(
      model, c.mesh ? c.mesh : parallel::init_device_mesh(group, {{"dp", -1}}), c.options,
      c.with_units ? model->units() : std::vector<torch::nn::Module*>{});
  optim::Adam adam(sharded.named_parameters());
  for (int step = 0; step < 20; ++step) {
    const auto run = [&](int i) {
      loss_of(sharded(batch_of(group.rank(), step * c.delay + i))).backward();
    };
    for (int i = 0; i + 1 < c.delay; ++i) {
      if (c.synchronize_always) {
        run(i);
      } else {
        const auto guard = sharded.no_sync();
        run(i);
      }
    }
    run(c.delay - 1);
    const double norm = sharded.gradient_norm();
    adam.step(kRate, c.clip > 0 && norm > c.clip ? c.clip / norm : 1);
    adam.zero_grad();
    plain.step(step, c.delay, c.clip);
    ASSERT_NEAR(norm, plain.norm, 1e-9 * plain.norm);
  }
  {
    // Without gradients: gathered and freed again.
    const at::NoGradGuard no_grad;
    const at::Tensor output = sharded(batch_of(0, 100));
    EXPECT_LE((output - plain.model->forward(batch_of(0, 100))).abs().max().item<double>(),
              kRounding);
  }
  const auto whole = sharded.unsharded();
  EXPECT_LE(difference(*model, *plain.model), kRounding);
}

}  // namespace cohort::test::sharding
