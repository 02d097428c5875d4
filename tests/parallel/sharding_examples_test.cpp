// SPDX-License-Identifier: Apache-2.0
// The examples of docs/sharding.md, at work: the page shows nothing that does not stand here.
#include <cctype>
#include <filesystem>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/clip_grad.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/zero_redundancy_optimizer.h"
#include "cohort/train/sharded_checkpoint.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/environment.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace sharding_examples_test {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : up(width, 2 * width), down(2 * width, width) {
    register_module("up", up);
    register_module("down", down);
    scale = register_parameter("scale", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return scale * down(at::tanh(up(x))); }
  parallel::Unit<torch::nn::Linear> up, down;
  at::Tensor scale;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), parallel::Unit<Block>(8)));
    steps = register_buffer("steps", at::zeros({1}));
  }
  at::Tensor forward(at::Tensor x) {
    steps.add_(1);
    x = first(x);
    for (auto& block : blocks) x = block(x);
    return x;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 8));
  std::vector<parallel::Unit<Block>> blocks;
  at::Tensor steps;
};
TORCH_MODULE(Net);

// The same weights wherever it is made.
Net make_net() {
  Net net;
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(
        at::arange(parameter.numel(), at::kFloat).add(++phase).sin().view(parameter.sizes()));
  }
  return net;
}

at::Tensor batch_of(int rank, int step) {
  return at::arange(8, at::kFloat).mul(1 + rank + 0.37 * step).cos().view({2, 4});
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

// Updates of one process on both ranks' batches, of which each takes `delay`.
void train_plain(Net& net, int steps, const std::vector<at::Tensor>& trained, int delay = 1) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const at::Tensor& each : trained) named.emplace_back(std::to_string(named.size()), each);
  optim::Adam adam(named);
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < 2; ++rank)
      for (int i = 0; i < delay; ++i)
        (loss_of(net->forward(batch_of(rank, step * delay + i))) / 2).backward();
    adam.step(1e-2);
    adam.zero_grad();
  }
}

Net trained_plain(int steps) {
  Net net = make_net();
  train_plain(net, steps, net->parameters());
  return net;
}

// float32; Adam divides gradients by their own size, so a wrong one moves a parameter by 1e-2.
void expect_equal(Net& found, Net& expected) {
  const auto other = expected->named_parameters();
  for (const auto& item : found->named_parameters())
    EXPECT_TRUE(item.value().allclose(other[item.key()], 1e-4, 1e-4)) << item.key();
}

TEST(ShardingExamplesTest, TrainingAndWholeParameters) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto batch = [&](int step) { return batch_of(group.rank(), step); };
    Net net = make_net();
    parallel::FullyShardedDataParallel sharded(net, group, {.shard = parallel::Shard::kParameters});
    torch::optim::Adam optimizer(sharded.parameters(), 1e-2);
    for (int step = 0; step < 3; ++step) {
      loss_of(sharded(batch(step))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    Net expected = make_net();
    torch::optim::Adam plain(expected->parameters(), 1e-2);
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < 2; ++rank)
        (loss_of(expected->forward(batch_of(rank, step))) / 2).backward();
      plain.step();
      plain.zero_grad();
    }
    const TemporaryFolder folder;
    const std::string path = folder / "net.pt";
    {
      auto whole = sharded.unsharded();
      expect_equal(net, expected);
      torch::save(net, path);
    }
    Net loaded;
    torch::load(loaded, path);
    expect_equal(loaded, expected);
    {
      auto whole = sharded.unsharded({.write_back = true});
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.clamp_(-0.5, 0.5);
    }
    auto whole = sharded.unsharded();
    EXPECT_GT(expected->first->weight.abs().max().item<double>(), 0.5);
    EXPECT_EQ(net->first->weight.abs().max().item<double>(), 0.5);
  });
}

TEST(ShardingExamplesTest, Clipping) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    constexpr double max_norm = 1e-3;
    Net plain = make_net();
    for (int rank = 0; rank < 2; ++rank)
      (loss_of(plain->forward(batch_of(rank, 0))) / 2).backward();
    const double plain_norm = std::sqrt(optim::gradient_norm_squared(plain->parameters()));
    Net net = make_net();
    parallel::FullyShardedDataParallel sharded(net, group);
    loss_of(sharded(batch_of(group.rank(), 0))).backward();
    const double norm = parallel::clip_grad_norm_(sharded, max_norm);
    EXPECT_NEAR(norm, plain_norm, 1e-5 * plain_norm);
    EXPECT_NEAR(sharded.gradient_norm(), max_norm, 1e-3 * max_norm);
  });
}

TEST(ShardingExamplesTest, NoSync) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto batch = [&](int step) { return batch_of(group.rank(), step); };
    Net net = make_net();
    parallel::FullyShardedDataParallel sharded(net, group);
    optim::Adam adam(sharded.named_parameters());
    {
      auto local = sharded.no_sync();
      loss_of(sharded(batch(0))).backward();
    }
    loss_of(sharded(batch(1))).backward();
    adam.step(1e-2);
    Net expected = make_net();
    train_plain(expected, 1, expected->parameters(), /*delay=*/2);
    auto whole = sharded.unsharded();
    expect_equal(net, expected);
  });
}

struct CoderImpl : torch::nn::Module {
  CoderImpl() : linear(4, 4) { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  parallel::Unit<torch::nn::Linear> linear;
};
TORCH_MODULE(Coder);

TEST(ShardingExamplesTest, TwoModelsInOneLoss) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto batch = [&](int step) { return batch_of(group.rank(), step); };
    Coder inner;
    Coder outer;
    parallel::FullyShardedDataParallel encoder(inner, group);
    parallel::FullyShardedDataParallel decoder(outer, group);
    const at::Tensor hidden = encoder(batch(0));
    (loss_of(decoder(hidden)) + loss_of(hidden)).backward();
    // Both are rank 0's now.
    const auto plain = [&](parallel::FullyShardedDataParallel<Coder>& model) {
      Coder copy;
      auto whole = model.unsharded();
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < copy->parameters().size(); ++i)
        copy->parameters()[i].copy_(model->parameters()[i]);
      return copy;
    };
    Coder first = plain(encoder);
    Coder second = plain(decoder);
    for (int rank = 0; rank < 2; ++rank) {
      const at::Tensor output = first->forward(batch_of(rank, 0));
      ((loss_of(second->forward(output)) + loss_of(output)) / 2).backward();
    }
    const auto norm = [](Coder& model) {
      return std::sqrt(optim::gradient_norm_squared(model->parameters()));
    };
    EXPECT_NEAR(encoder.gradient_norm() / norm(first), 1, 1e-5);
    EXPECT_NEAR(decoder.gradient_norm() / norm(second), 1, 1e-5);
  });
}

TEST(ShardingExamplesTest, NestedUnitsAndReshardRanks) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Net plain = make_net();
    for (int rank = 0; rank < 2; ++rank)
      (loss_of(plain->forward(batch_of(rank, 0))) / 2).backward();
    Net net = make_net();
    const int ranks_of_a_host = 2;
    parallel::FullyShardedDataParallel sharded(net, group, {.reshard_ranks = ranks_of_a_host});
    EXPECT_EQ(sharded.engine().num_units(), 1 + 9);
    loss_of(sharded(batch_of(group.rank(), 0))).backward();
    const double norm = std::sqrt(optim::gradient_norm_squared(plain->parameters()));
    EXPECT_NEAR(sharded.gradient_norm() / norm, 1, 1e-5);
  });
}

TEST(ShardingExamplesTest, HybridOnAMesh) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Net net = make_net();
    const auto mesh = cohort::init_device_mesh(group, {{"dp_replicate", -1}, {"dp_shard", 2}});
    parallel::FullyShardedDataParallel sharded(net, mesh);
    optim::Adam adam(sharded.named_parameters());
    for (int step = 0; step < 2; ++step) {
      loss_of(sharded(batch_of(group.rank(), step))).backward();
      adam.step(1e-2);
      adam.zero_grad();
    }
    Net expected = make_net();
    train_plain(expected, 2, expected->parameters());
    auto whole = sharded.unsharded();
    expect_equal(net, expected);
  });
}

TEST(ShardingExamplesTest, FrozenParameters) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Net net = make_net();
    for (auto& block : net->blocks)
      for (at::Tensor& parameter : block->parameters()) parameter.set_requires_grad(false);
    parallel::FullyShardedDataParallel sharded(net, group);
    optim::Adam adam(sharded.named_parameters());  // of what is in `first`
    for (int step = 0; step < 2; ++step) {
      loss_of(sharded(batch_of(group.rank(), step))).backward();
      adam.step(1e-2);
      adam.zero_grad();
    }
    Net expected = make_net();
    train_plain(expected, 2, expected->first->parameters());
    auto whole = sharded.unsharded();
    expect_equal(net, expected);
  });
}

TEST(ShardingExamplesTest, IgnoredParameters) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Net net = make_net();
    parallel::FullyShardedDataParallel sharded(net, group, {.ignored = {"first"}});
    optim::Adam adam(sharded.named_parameters());
    optim::Adam own(optim::named_parameters(*net->first));
    loss_of(sharded(batch_of(group.rank(), 0))).backward();
    Net plain = make_net();
    loss_of(plain->forward(batch_of(group.rank(), 0))).backward();
    EXPECT_TRUE(net->first->weight.grad().allclose(plain->first->weight.grad(), 1e-4, 1e-6));
    for (optim::Adam* each : {&adam, &own}) each->step(1e-2);
    EXPECT_FALSE(net->first->weight.equal(plain->first->weight));
  });
}

// A folder that both ranks know; rank 0 removes it.
class RankFolder {
 public:
  explicit RankFolder(const comm::ProcessGroup& group) : group_(group) {
    if (group.rank() == 0) own_ = std::make_unique<TemporaryFolder>();
    path_ = group.broadcast_object(own_ ? *own_ / "checkpoint" : "");
  }
  ~RankFolder() { group_.barrier("folder"); }
  RankFolder(const RankFolder&) = delete;
  RankFolder& operator=(const RankFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  comm::ProcessGroup group_;
  std::unique_ptr<TemporaryFolder> own_;
  std::string path_;
};

TEST(ShardingExamplesTest, CheckpointsHaveBuffers) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const RankFolder shared(group);
    const std::string folder = shared.path();
    Net net = make_net();
    parallel::ParallelModel model(net, group, {.strategy = parallel::Strategy::kZero3});
    optim::Adam adam(model.named_parameters());
    const auto moments = [&] {
      return train::shards_like(train::shards_of(model.local_shards()), adam.state());
    };
    const auto save = [&] {
      if (!model.checkpoint_writers()) return;
      train::ShardedCheckpointWriter writer(model.checkpoint_writers());
      writer.begin(folder,
                   {{"weights", train::shards_of(model.state_to_save())}, {"optimizer", moments()}},
                   adam.num_steps(), {});
      writer.commit();
    };
    const auto load = [&] {
      train::load_shards(
          folder, {{"weights", train::shards_of(model.state_to_load())}, {"optimizer", moments()}},
          group);
      adam.set_num_steps(train::read_update(folder));
    };
    const auto train_step = [&](int step) {
      loss_of(model(batch_of(group.rank(), step))).backward();
      adam.step(1e-2);
      adam.zero_grad();
    };
    train_step(0);
    net->steps.fill_(7 + group.rank());
    save();
    train_step(5);
    load();
    EXPECT_EQ(net->steps.item<float>(), 7) << "the first rank's, on both";
    train_step(1);
    Net expected = trained_plain(2);
    {
      auto whole = model.unsharded();
      expect_equal(net, expected);
    }
    // Another strategy, and a plain module.
    save();
    Net plain;
    train::load_checkpoint(folder, *plain);
    expect_equal(plain, expected);
    EXPECT_EQ(plain->steps.item<float>(), 8);
    Net replica;
    parallel::ParallelModel ddp(replica, group);
    train::load_shards(folder, {{"weights", train::shards_of(ddp.state_to_load())}}, group);
    expect_equal(replica, expected);
    EXPECT_EQ(replica->steps.item<float>(), 8);
    // Buckets in another order.
    std::vector<std::string> order;
    for (const auto& item : net->named_parameters()) order.insert(order.begin(), item.key());
    Net reordered;
    parallel::ParallelModel sharded(reordered, group,
                                    {.strategy = parallel::Strategy::kZero2,
                                     .ddp = {},
                                     .sharding = {.forward_order = order},
                                     .tensor_parallel = {}});
    train::load_shards(folder, {{"weights", train::shards_of(sharded.state_to_load())}}, group);
    const auto whole = sharded.unsharded();
    expect_equal(reordered, expected);
  });
}

TEST(ShardingExamplesTest, ZeroRedundancyOptimizerAndItsCheckpoint) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const RankFolder shared(group);
    const std::string folder = shared.path();
    const auto batch = [&](int step) { return batch_of(group.rank(), step); };
    Net net = make_net();
    parallel::DistributedDataParallel ddp(net, group);
    parallel::ZeroRedundancyOptimizer<optim::Adam> zero(
        ddp.named_parameters(), group, [](const auto& shards) {
          std::vector<std::pair<std::string, at::Tensor>> named;
          for (const auto& shard : shards) named.emplace_back(shard.name, shard.tensor);
          return optim::Adam(named);
        });
    for (int step = 0; step < 3; ++step) {
      loss_of(ddp(batch(step))).backward();
      zero.step(1e-2);
      zero.zero_grad();
    }
    const auto weights = [&] { return train::full_shards(train::state_of(*net)); };
    const auto moments = [&] {
      return train::shards_like(train::shards_of(zero.local_shards()), zero.optimizer().state());
    };
    const auto save = [&] {
      auto parts = train::share_of({{"weights", weights()}}, group.rank(), group.size());
      parts["optimizer"] = moments();
      train::ShardedCheckpointWriter writer(group);
      writer.begin(folder, parts, zero.optimizer().num_steps(), {});
      writer.commit();
    };
    const auto load = [&] {
      train::load_shards(folder, {{"weights", weights()}, {"optimizer", moments()}}, group);
      zero.optimizer().set_num_steps(train::read_update(folder));
    };
    const auto train_step = [&](int step) {
      loss_of(ddp(batch(step))).backward();
      zero.step(1e-2);
      zero.zero_grad();
    };
    save();
    train_step(9);
    load();
    train_step(3);
    Net expected = trained_plain(4);
    expect_equal(net, expected);
  });
}

// Without what is between words.
std::string squeezed(const std::string& text) {
  std::string result;
  for (const char c : text)
    if (std::isspace(static_cast<unsigned char>(c)) == 0) result += c;
  return result;
}

TEST(ShardingExamplesTest, ThePageShowsWhatStandsHere) {
  const std::string root = test::environment("COHORT_SOURCE");
  const std::string page = read_file(root + "/docs/sharding.md");
  const std::string here = squeezed(read_file(root + "/tests/parallel/sharding_examples_test.cpp"));
  const std::string fence = "```cpp\n";
  int blocks = 0;
  for (size_t at = page.find(fence); at != std::string::npos; at = page.find(fence, at + 1)) {
    const size_t begin = at + fence.size();
    const std::string block = page.substr(begin, page.find("```", begin) - begin);
    EXPECT_NE(here.find(squeezed(block)), std::string::npos) << block;
    ++blocks;
  }
  EXPECT_EQ(blocks, 15);
}

}  // namespace sharding_examples_test
}  // namespace cohort
