// Training with shared-out state against one process that holds everything.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/flat_layout.h"
#include "cohort/parallel/sharding/sharded_data_parallel.h"

#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

// float64; per step some hundred roundings of 1e-16 in a gradient, which Adam divides by its own
// size: a wrong gradient moves parameters by the rate, 1e-2.
constexpr double kRounding = 1e-9;
constexpr double kRate = 1e-2;

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
  at::Tensor forward(const at::Tensor& x) { return unit(inner, x * scale); }
  Block inner{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Outer);

// The head is the first layer's table again; a block runs twice; a parameter is frozen.
struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    table = register_parameter("table", at::zeros({5, 3}));
    outer = register_module("outer", Outer(3));
    block = register_module("block", Block(3));
    frozen = register_module("frozen", Block(3));
    to(at::kDouble);
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

at::Tensor batch_of(int rank, int step) {
  return at::arange(20, at::kDouble).mul(1 + rank + 0.37 * step).cos().view({4, 5});
}

at::Tensor loss_of(const at::Tensor& output) {
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

double difference(Tower& a, Tower& b) {
  double largest = 0;
  const auto expected = b->named_parameters();
  for (const auto& item : a->named_parameters())
    largest = std::max(largest, (item.value() - expected[item.key()]).abs().max().item<double>());
  return largest;
}

struct Case {
  ShardingOptions options;
  bool with_units = true;
  int delay = 1;
  bool synchronize_always = false;  // no no_sync around the first batches
  double clip = 0;
};

void expect_plain_training(comm::ProcessGroup& group, const Case& c) {
  SCOPED_TRACE("shard " + std::to_string(static_cast<int>(c.options.shard)) + " units " +
               std::to_string(c.with_units) + " delay " + std::to_string(c.delay));
  Plain plain(group.size());
  Tower model;
  ShardedDataParallel<Tower> sharded(
      model, group, c.options, c.with_units ? model->units() : std::vector<torch::nn::Module*>{});
  auto named = sharded.named_slices();
  std::erase_if(named, [](const auto& each) { return !each.second.requires_grad(); });
  optim::Adam adam(named);
  for (int step = 0; step < 20; ++step) {
    const auto run = [&](int i) {
      sharded.backward(loss_of(sharded(batch_of(group.rank(), step * c.delay + i))));
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
    const double norm = sharded.engine().gradient_norm();
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
  sharded.engine().summon();
  EXPECT_LE(difference(model, plain.model), kRounding);
  sharded.engine().release(/*keep=*/false);
}

void expect_plain_training_in_all_cases(comm::ProcessGroup& group) {
  for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
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

TEST(ShardingTest, FourRanksTrainAsOneProcess) {
  test::ranks(4, [](comm::ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters})
      expect_plain_training(group, {.options = {.shard = shard}, .delay = 2, .clip = 0.5});
  });
}

TEST(ShardingTest, OneRankTrainsAsOneProcess) {
  comm::ProcessGroup alone(comm::Place{});
  expect_plain_training_in_all_cases(alone);
}

TEST(FlatLayoutTest, ShardsHoldEveryElementOnceAndDifferByPaddingAlone) {
  for (int shards = 1; shards <= 9; ++shards) {
    const FlatLayout layout({{.name = "a", .shape = {3, 2}, .numel = 6},
                             {.name = "b", .shape = {}, .numel = 1},
                             {.name = "c", .shape = {0}, .numel = 0},
                             {.name = "d", .shape = {11}, .numel = 11}},
                            shards);
    EXPECT_EQ(layout.numel(), 18);
    EXPECT_LT(layout.padded_numel() - layout.numel(), shards);
    std::vector<std::vector<int>> times(4);
    for (size_t i = 0; i < times.size(); ++i)
      times[i].resize(static_cast<size_t>(layout.tensors()[i].numel));
    for (int rank = 0; rank < shards; ++rank) {
      int64_t filled = 0;
      for (const FlatSlice& slice : layout.slices(rank)) {
        EXPECT_EQ(slice.offset, filled);
        filled += slice.end - slice.begin;
        for (int64_t k = slice.begin; k < slice.end; ++k)
          ++times[slice.tensor][static_cast<size_t>(k)];
      }
      EXPECT_LE(filled, layout.shard_numel());
    }
    for (const auto& of_tensor : times)
      for (const int count : of_tensor) EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace cohort::parallel
