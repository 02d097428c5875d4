// SPDX-License-Identifier: Apache-2.0
// Activation checkpoints against plain calls: every bit the same.
#include "cohort/parallel/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/translate/tensor_memory.h"

#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace activation_checkpoint_test {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width = 6, int64_t inner = 9) {
    first = register_module("first", torch::nn::Linear(width, inner));
    second = register_module("second", torch::nn::Linear(inner, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + second(at::dropout(at::tanh(first(x)), 0.3, is_training()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Block);

// Some blocks, with or without activation checkpoint.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(std::vector<bool> selected, bool as_units = false)
      : recompute(std::move(selected)), units(as_units) {
    for (size_t i = 0; i < recompute.size(); ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    to(at::kDouble);
    torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(phase += 1).sin().view(parameter.sizes()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto body = [&] {
        return recompute[i] ? activation_checkpoint_module(blocks[i], {}, x)
                            : blocks[i]->forward(x);
      };
      x = units ? run_unit(*blocks[i], body) : body();
    }
    return x;
  }
  std::vector<torch::nn::Module*> list() {
    std::vector<torch::nn::Module*> all;
    for (Block& block : blocks) all.push_back(block.get());
    return all;
  }
  std::vector<bool> recompute;
  bool units;
  std::vector<Block> blocks;
};
TORCH_MODULE(Tower);

at::Tensor batch_of(int rank, int step = 0) {
  return at::arange(24, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({4, 6});
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

void expect_same_bits(const std::vector<at::Tensor>& found,
                      const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
    if (found[i].defined()) {
      EXPECT_TRUE(found[i].equal(expected[i])) << "tensor " << i;
    }
  }
}

// Losses, gradients and what the generator gives next, of two steps.
std::vector<at::Tensor> two_steps(const std::vector<bool>& recompute) {
  Tower tower(recompute);
  torch::manual_seed(3);
  std::vector<at::Tensor> found;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x = batch_of(0, step).requires_grad_(true);
    const at::Tensor loss = loss_of(tower->forward(x));
    loss.backward();
    found.insert(found.end(), {loss.detach(), x.grad()});
  }
  for (const auto& parameter : tower->parameters()) found.push_back(parameter.grad());
  found.push_back(at::rand({4}));
  return found;
}

TEST(ActivationCheckpointTest, DropoutOfTheDefaultGeneratorChangesNoBitWhicheverBlocksAreChosen) {
  const auto expected = two_steps({false, false, false});
  expect_same_bits(two_steps({true, true, true}), expected);
  expect_same_bits(two_steps({false, true, false}), expected);
}

// Blocks that the bodies know by themselves: the first one's input needs no gradient, the others'
// do.
struct CapturingImpl : torch::nn::Module {
  explicit CapturingImpl(bool selected, bool as_units = false)
      : tower(std::vector<bool>{false, false, false}), recompute(selected), units(as_units) {
    register_module("tower", tower);
  }
  at::Tensor forward(at::Tensor x) {
    for (Block& block : tower->blocks) {
      auto call = [this, block](const at::Tensor& h) mutable {
        ++runs;
        return block->forward(h);
      };
      const auto body = [&] { return recompute ? activation_checkpoint({}, call, x) : call(x); };
      x = units ? run_unit(*block, body) : body();
    }
    return x;
  }
  Tower tower;
  bool recompute;
  bool units;
  int runs = 0;
};
TORCH_MODULE(Capturing);

TEST(ActivationCheckpointTest, WhatABodyCapturesGetsItsGradient) {
  const auto run = [](bool recompute) {
    Capturing model(recompute);
    torch::manual_seed(3);
    for (int step = 0; step < 2; ++step) loss_of(model->forward(batch_of(0, step))).backward();
    EXPECT_EQ(model->runs, recompute ? 12 : 6);
    std::vector<at::Tensor> found;
    for (const auto& parameter : model->parameters()) found.push_back(parameter.grad());
    return found;
  };
  expect_same_bits(run(true), run(false));
}

TEST(ActivationCheckpointTest, HooksOfALeafRunOnce) {
  for (const bool named : {false, true}) {
    at::Tensor weight = at::full({2}, 3.0).requires_grad_(true);
    int calls = 0;
    weight.register_hook([&](const at::Tensor& gradient) { return ++calls, gradient * 2; });
    const at::Tensor x = at::ones({2}).requires_grad_(true);
    ActivationCheckpointOptions options;
    if (named) options.parameters = {weight};
    activation_checkpoint([&](const auto& in) { return std::vector{in[0] * weight}; }, {x},
                          options)[0]
        .sum()
        .backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(weight.grad().equal(at::full({2}, 2.0))) << weight.grad();
    EXPECT_TRUE(x.grad().equal(at::full({2}, 3.0)));
  }
}

TEST(ActivationCheckpointTest, ACapturedTensorThatHasAHistoryIsNamed) {
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  const at::Tensor scale = weight.exp();
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  const auto body = [&](const std::vector<at::Tensor>& in) { return std::vector{in[0] * scale}; };
  try {
    activation_checkpoint(body, {x});
    FAIL() << "nothing was thrown";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("activation checkpoint: the body uses a result of ExpBackward0 from "
                        "outside; expected it "
                        "among the inputs"),
              std::string::npos)
        << error.what();
  }
  // Named, it gets its gradient; but beside what it was computed from, that would get it twice.
  activation_checkpoint(body, {x}, {.parameters = {scale}})[0].sum().backward();
  EXPECT_TRUE(weight.grad().equal(scale)) << weight.grad();
  const at::Tensor again = weight.exp();
  const auto both = [&](const std::vector<at::Tensor>& in) {
    return std::vector{in[0] * again * weight};
  };
  for (const bool named : {false, true}) {
    ActivationCheckpointOptions options{.parameters = {again}};
    if (named) options.parameters.push_back(weight);
    EXPECT_THROW(activation_checkpoint(both, {x}, options), c10::ValueError);
  }
}

TEST(ActivationCheckpointTest, ANamedSourceIsPutBackAndItsPresentPlaceKept) {
  uint64_t calls = 0;
  const RandomSource source = [&calls] { return [&calls, there = calls] { calls = there; }; };
  std::vector<uint64_t> drawn;
  const ActivationCheckpointOptions options{.preserve_rng_state = false, .random = {source}};
  const auto body = [&](const std::vector<at::Tensor>& in) {
    drawn.push_back(++calls);
    return std::vector{in[0] * static_cast<double>(calls)};
  };
  const at::Tensor x = at::ones({2}, at::kDouble).requires_grad_(true);
  const at::Tensor y =
      activation_checkpoint(body, activation_checkpoint(body, {x}, options), options)[0];
  ++calls;
  y.sum().backward();
  EXPECT_EQ(drawn, (std::vector<uint64_t>{1, 2, 2, 1}));
  EXPECT_EQ(calls, 3U);
  EXPECT_TRUE(x.grad().equal(at::full({2}, 2.0, at::kDouble)));
}

TEST(ActivationCheckpointTest, ABodyMayReturnSeveralTensorsOfWhichSomeAreLeftOut) {
  Block block;
  const ActivationCheckpointOptions options{.parameters = block->parameters()};
  auto call = [block](const at::Tensor& x, const std::vector<at::Tensor>& more,
                      double factor) mutable {
    const at::Tensor y = block->forward(x + more[0]);
    return std::tuple(y * factor, y.exp(), at::ones({3}, at::kLong), int64_t{7});
  };
  const auto run = [&](bool recompute) {
    torch::manual_seed(5);
    block->zero_grad();
    const at::Tensor x = at::ones({2, 6}).requires_grad_(true);
    const std::vector<at::Tensor> more{at::full({6}, 0.5).requires_grad_(true)};
    const auto [scaled, left_out, count, number] =
        recompute ? activation_checkpoint(options, call, x, more, 2.0) : call(x, more, 2.0);
    EXPECT_EQ(number, 7);
    EXPECT_FALSE(count.requires_grad());
    EXPECT_TRUE(left_out.requires_grad());
    scaled.sum().backward();
    std::vector<at::Tensor> all{scaled.detach(), left_out.detach(), x.grad(), more[0].grad()};
    all.push_back(count);
    for (const auto& parameter : block->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  expect_same_bits(run(true), run(false));
}

TEST(ActivationCheckpointTest, OneWithinAnother) {
  const auto run = [](bool outer, bool inner) {
    Tower tower(std::vector<bool>{inner, inner});
    torch::manual_seed(9);
    const at::Tensor x = batch_of(1).requires_grad_(true);
    const at::Tensor y = outer ? activation_checkpoint_module(tower, {}, x) : tower->forward(x);
    loss_of(y).backward();
    std::vector<at::Tensor> found{y.detach(), x.grad()};
    for (const auto& parameter : tower->parameters()) found.push_back(parameter.grad());
    return found;
  };
  const auto expected = run(false, false);
  expect_same_bits(run(true, true), expected);
  expect_same_bits(run(true, false), expected);
}

// Output and gradients of a block that is used so many times, one after another, under autocast.
std::vector<at::Tensor> run_under_autocast(bool recompute, int times) {
  torch::manual_seed(2);
  Block block(16, 24);
  const at::Tensor x = at::rand({8, 16}).requires_grad_(true);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  at::Tensor y = x;
  for (int i = 0; i < times; ++i)
    y = recompute ? activation_checkpoint_module(block, {}, y) : block->forward(y);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::Tensor wide = x;
  for (int i = 0; i < times; ++i) wide = block->forward(wide);
  EXPECT_FALSE(y.equal(wide)) << "bfloat16 shows";
  torch::manual_seed(4);
  y.pow(2).sum().backward();
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  std::vector<at::Tensor> found{y.detach(), x.grad()};
  for (const auto& parameter : block->parameters()) found.push_back(parameter.grad());
  return found;
}

TEST(ActivationCheckpointTest, AutocastIsThatOfTheFirstRun) {
  expect_same_bits(run_under_autocast(true, 1), run_under_autocast(false, 1));
}

// Autocast keeps the cast of a weight until the outermost level ends.
TEST(ActivationCheckpointTest, ABlockMayBeUsedTwiceUnderAutocast) {
  const auto found = run_under_autocast(true, 2), expected = run_under_autocast(false, 2);
  EXPECT_TRUE(found[0].equal(expected[0]));
  // A gradient is summed from two casts in float32, without recomputation from one in bfloat16.
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::allclose(found[i], expected[i], 0x1p-5, 0x1p-5)) << i;
}

TEST(ActivationCheckpointTest, WithoutGradientsItIsAPlainCall) {
  int runs = 0;
  const auto body = [&](const std::vector<at::Tensor>& in) {
    ++runs;
    EXPECT_EQ(inside_activation_checkpoint(), at::GradMode::is_enabled());
    return std::vector{in[0] * 2};
  };
  EXPECT_FALSE(activation_checkpoint(body, {at::ones({2})})[0].requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(
      activation_checkpoint(body, {at::ones({2}).requires_grad_(true)})[0].requires_grad());
  EXPECT_EQ(runs, 2);
}

TEST(ActivationCheckpointTest, GradientsOfGradientsAreRefused) {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  const at::Tensor y =
      activation_checkpoint([](const auto& in) { return std::vector{in[0] * in[0]}; }, {x})[0]
          .sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true),
               c10::NotImplementedError);
}

TEST(ActivationCheckpointTest, ItKeepsTheInputsAlone) {
  // 8 blocks of 64 x 6 inputs and inner width 600: what a block computes is 400 times its input.
  const auto peak = [](bool recompute) {
    std::vector<Block> blocks;
    for (int i = 0; i < 8; ++i) blocks.emplace_back(6, 600);
    const auto step = [&] {
      at::Tensor x = at::ones({64, 6}).requires_grad_(true);
      for (Block& block : blocks)
        x = recompute ? activation_checkpoint_module(block, {}, x) : block->forward(x);
      x.sum().backward();
    };
    step();  // Gradients are there from now on.
    return translate::peak_tensor_bytes(step);
  };
  EXPECT_LT(peak(true), peak(false) / 3);
}

TEST(ActivationCheckpointTest, UnderDistributedDataParallelNoBitChanges) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    std::vector<std::vector<at::Tensor>> found;
    for (const bool recompute : {false, true}) {
      Tower tower(std::vector<bool>{recompute, recompute});
      DistributedDataParallel<Tower> ddp(tower, group);
      torch::manual_seed(static_cast<uint64_t>(group.rank()));
      for (int step = 0; step < 3; ++step) loss_of(ddp(batch_of(group.rank(), step))).backward();
      found.emplace_back();
      for (const auto& parameter : tower->parameters()) found.back().push_back(parameter.grad());
    }
    expect_same_bits(found[1], found[0]);
  });
}

TEST(ActivationCheckpointTest, InsideShardedUnitsNoBitChanges) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      std::vector<std::vector<at::Tensor>> found;
      for (const bool recompute : {false, true}) {
        Tower tower(std::vector<bool>{recompute, recompute, false}, /*as_units=*/true);
        FullyShardedDataParallel<Tower> sharded(tower, group, {.shard = shard}, tower->list());
        torch::manual_seed(static_cast<uint64_t>(group.rank()));
        for (int step = 0; step < 3; ++step)
          loss_of(sharded(batch_of(group.rank(), step))).backward();
        found.emplace_back();
        for (const auto& local_shard : sharded.local_shards())
          found.back().push_back(local_shard.tensor.grad());
      }
      expect_same_bits(found[1], found[0]);
    }
  });
}

TEST(ActivationCheckpointTest, WhatABodyCapturesLearnsOnSeveralRanksToo) {
  test::ranks(3, [](const comm::ProcessGroup& group) {
    std::vector<std::vector<at::Tensor>> found;
    const auto train = [&](auto& model, auto& wrapped, const auto& tensors) {
      torch::manual_seed(static_cast<uint64_t>(group.rank()));
      for (int step = 0; step < 3; ++step)
        loss_of(wrapped(batch_of(group.rank(), step))).backward();
      EXPECT_GT(model->runs, 0);
      found.emplace_back();
      for (const auto& tensor : tensors()) found.back().push_back(tensor.grad());
    };
    for (const bool finds_unused : {false, true}) {
      for (const bool recompute : {false, true}) {
        Capturing model(recompute);
        DistributedDataParallel<Capturing> ddp(model, group,
                                               {.find_unused_parameters = finds_unused});
        train(model, ddp, [&] { return model->parameters(); });
      }
      expect_same_bits(found[1], found[0]);
      found.clear();
    }
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
      for (const bool recompute : {false, true}) {
        Capturing model(recompute, /*as_units=*/true);
        FullyShardedDataParallel<Capturing> sharded(model, group, {.shard = shard},
                                                    model->tower->list());
        train(model, sharded, [&] {
          std::vector<at::Tensor> shards;
          for (const auto& local_shard : sharded.local_shards())
            shards.push_back(local_shard.tensor);
          return shards;
        });
      }
      expect_same_bits(found[1], found[0]);
      found.clear();
    }
  });
}

TEST(ActivationCheckpointTest, CapturedParametersOfLowPrecisionAreNamed) {
  comm::ProcessGroup alone(comm::RankInfo{});
  Capturing model(true);
  DistributedDataParallel<Capturing> ddp(model, alone,
                                         {.mixed_precision = {.param_dtype = at::kBFloat16}});
  try {
    ddp(batch_of(0));
    FAIL() << "nothing was thrown";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("ActivationCheckpointOptions::parameters"),
              std::string::npos)
        << error.what();
  }
}

TEST(ActivationCheckpointTest, AUnitInsideABodyIsRefused) {
  comm::ProcessGroup alone(comm::RankInfo{});
  struct BackwardsImpl : torch::nn::Module {
    BackwardsImpl() { block = register_module("block", parallel::Unit<Block>()); }
    at::Tensor forward(const at::Tensor& x) {
      return activation_checkpoint([this](const auto& in) { return std::vector{block(in[0])}; },
                                   {x}, {.parameters = block->parameters()})[0];
    }
    parallel::Unit<Block> block{nullptr};
  };
  struct Backwards : torch::nn::ModuleHolder<BackwardsImpl> {
    using torch::nn::ModuleHolder<BackwardsImpl>::ModuleHolder;
  };
  Backwards model;
  FullyShardedDataParallel<Backwards> sharded(model, alone);
  EXPECT_THROW(sharded(at::ones({2, 6})), c10::ValueError);
}

}  // namespace activation_checkpoint_test
}  // namespace cohort::parallel
