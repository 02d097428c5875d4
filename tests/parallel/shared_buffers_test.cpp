// SPDX-License-Identifier: Apache-2.0
// Buckets, shards and gathered units over shm: they lie in memory that the ranks share, once, and
// their bits are those of ordinary memory.
#include <filesystem>
#include <gtest/gtest.h>
#include <map>
#include <sys/stat.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/comm_hooks/all_reduce.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/parallel/sharding/unit.h"

#include "tests/support/ranks.h"
#include "tests/support/shared_mapping.h"

namespace cohort::parallel {
namespace shared_buffers_test {

using comm::ProcessGroup;

const comm::ProcessGroupOptions kShm{.backend = "shm"};
constexpr int64_t kWidth = 512;  // a unit's shard of 4 ranks is above what goes by the slots

// Whether all ranks of its group see it.
bool is_shared(const at::Tensor& tensor) {
  return test::shared_mapping_of(tensor) != nullptr;
}

// By file: what all ranks of a group share.
std::map<ino_t, int64_t> shared_files() {
  std::map<ino_t, int64_t> bytes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    struct stat status {};
    if (target.find("cohort-shm") == std::string::npos || stat(entry.path().c_str(), &status) != 0)
      continue;
    bytes[status.st_ino] = status.st_blocks * 512;
  }
  return bytes;
}

// Of all ranks and groups together.
int64_t shared_bytes() {
  int64_t bytes = 0;
  for (const auto& [file, size] : shared_files()) bytes += size;
  return bytes;
}

struct LayerImpl : torch::nn::Module {
  LayerImpl() { linear = register_module("linear", torch::nn::Linear(kWidth, kWidth)); }
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Layer);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    at::manual_seed(5);
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Unit<Layer>()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<Unit<Layer>> layers;
};
TORCH_MODULE(Net);

constexpr int64_t kNetBytes = 3 * (kWidth + 1) * kWidth * 4;

at::Tensor batch_for(int rank, int step) {
  return at::arange(4 * kWidth, at::kFloat).mul(1 + rank + 0.37 * step).cos().view({4, kWidth});
}

template <class Model>
void train(Model& model, const ProcessGroup& group, optim::Adam& adam, int step) {
  model(batch_for(group.rank(), step)).pow(2).mean().backward();
  adam.step(1e-3);
  adam.zero_grad();
}

TEST(SharedBuffersTest, GradientBucketsAreSharedAndThereOnce) {
  test::ranks(
      2,
      [](const ProcessGroup& world) {
        // Sums of two ranks' terms are the same in any order.
        std::vector<std::vector<at::Tensor>> trained;
        for (const std::string backend : {"shm", "gloo"}) {
          const ProcessGroup group = world.subgroup({0, 1}, backend, {.backend = backend});
          const int64_t before = shared_bytes();
          group.barrier("looked");
          Net net;
          DistributedDataParallel<Net> ddp(net, group, {.bucket_cap_mb = 1.1});
          int num_buckets = 0;
          ddp.register_comm_hook(
              [&](const ProcessGroup& ranks, Bucket bucket) {
                ++num_buckets;
                EXPECT_EQ(is_shared(bucket.buffer), backend == "shm");
                return all_reduce_hook()(ranks, std::move(bucket));
              },
              "watched");
          optim::Adam adam(ddp.named_parameters());
          for (int step = 0; step < 4; ++step) {
            train(ddp, group, adam, step);
            group.barrier("step");
            const int64_t expected = backend == "shm" ? 2 * kNetBytes : 0;
            EXPECT_LE(shared_bytes() - before, expected + (64 << 10)) << "after step " << step;
            EXPECT_GE(shared_bytes() - before, expected);
            group.barrier("looked");
          }
          EXPECT_GT(num_buckets, 4);
          trained.push_back(net->parameters());
        }
        for (size_t i = 0; i < trained[0].size(); ++i)
          EXPECT_TRUE(at::equal(trained[0][i], trained[1][i]));
      },
      kShm);
}

std::vector<at::Tensor> shards_after_training(const ProcessGroup& group,
                                              const ShardingOptions& options, bool shared) {
  Net net;
  FullyShardedDataParallel<Net> model(net, group, options);
  for (const LocalShard& shard : model.local_shards()) EXPECT_EQ(is_shared(shard.tensor), shared);
  optim::Adam adam(model.named_parameters());
  int64_t bytes = 0;
  for (int step = 0; step < 4; ++step) {
    train(model, group, adam, step);
    group.barrier("step");
    if (step < 2) bytes = shared_bytes();
    EXPECT_EQ(shared_bytes(), bytes) << "what a step frees, the next one takes again";
    group.barrier("looked");
  }
  std::vector<at::Tensor> shards;
  for (const LocalShard& shard : model.local_shards())
    shards.push_back(shard.tensor.detach().clone());
  return shards;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(SharedBuffersTest, ShardsAreSharedAndTrainToTheSameBits) {
  test::ranks(
      2,
      [](const ProcessGroup& world) {
        const ProcessGroup gloo = world.subgroup({0, 1}, "gloo", {.backend = "gloo"});
        for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters}) {
          const ShardingOptions plain{.shard = shard};
          expect_equal(shards_after_training(world, plain, true),
                       shards_after_training(gloo, plain, false));
          const ShardingOptions mixed{
              .shard = shard,
              .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
          expect_equal(shards_after_training(world, mixed, true),
                       shards_after_training(gloo, mixed, false));
        }
      },
      kShm);
}

TEST(SharedBuffersTest, WhatNeighboursKeepIsShared) {
  test::ranks(
      4,
      [](const ProcessGroup& world) {
        const auto before = shared_files();
        world.barrier("looked");
        Net net;
        FullyShardedDataParallel<Net> model(net, world, {.reshard_ranks = 2});
        // The groups of neighbours are the engine's; this rank sees its own.
        const auto made = shared_files();
        world.barrier("made");
        const at::Tensor loss = model(batch_for(world.rank(), 0)).pow(2).mean();
        world.barrier("forward");
        int64_t kept = 0;
        for (const auto& [file, bytes] : shared_files())
          if (!before.contains(file)) kept += bytes - made.at(file);
        world.barrier("kept");
        EXPECT_GE(kept, kNetBytes) << "a half of each unit, on both";
        EXPECT_LE(kept, kNetBytes + (64 << 10));
        loss.backward();
      },
      kShm);
}

TEST(SharedBuffersTest, NeighboursTrainToTheSameBits) {
  test::ranks(
      4,
      [](const ProcessGroup& world) {
        expect_equal(shards_after_training(world, {.reshard_ranks = 2}, true),
                     shards_after_training(world, {}, true));
      },
      kShm);
}

// The memory that ranks share stays for the group's life, the whole model is there for a moment.
TEST(SharedBuffersTest, TheUnshardedModelIsNotShared) {
  test::ranks(
      2,
      [](const ProcessGroup& world) {
        Net net;
        FullyShardedDataParallel<Net> model(net, world);
        optim::Adam adam(model.named_parameters());
        train(model, world, adam, 0);
        world.barrier("trained");
        const int64_t before = shared_bytes();
        world.barrier("looked");
        {
          const auto whole = model.unsharded();
          world.barrier("unsharded");
          EXPECT_EQ(shared_bytes(), before);
        }
        world.barrier("end");
      },
      kShm);
}

}  // namespace shared_buffers_test
}  // namespace cohort::parallel
