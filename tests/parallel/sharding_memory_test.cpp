// SPDX-License-Identifier: Apache-2.0
// Where the memory of gathered units and of gradients on their way comes from.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <fstream>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cohort/parallel/sharding/buffer_pool.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/ranks.h"
#include "tests/support/resident.h"

namespace cohort::parallel {
namespace sharding_memory_test {

using test::sharding::FullyShardedDataParallel;
using test::sharding::unit;

constexpr int64_t kMiB = 1 << 20;

int64_t page_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// Units of many small parameters, so that autograd's gradients are small blocks: `count` times 1 MiB.
struct WideImpl : torch::nn::Module {
  explicit WideImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false))));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Wide);

struct TallImpl : torch::nn::Module {
  TallImpl() {
    const at::NoGradGuard no_grad;
    for (const int64_t count : {9, 12, 9, 15})
      blocks.push_back(register_module("block" + std::to_string(blocks.size()), Wide(count)));
    double phase = 0;
    for (at::Tensor& each : parameters())
      each.copy_(
          at::arange(each.numel(), at::kFloat).add(phase += 1).sin().view(each.sizes()).mul(0.05));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = unit(block, x);
    return x;
  }
  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (auto& block : blocks) all.push_back(block.get());
    return all;
  }
  std::vector<Wide> blocks;
};
TORCH_MODULE(Tall);

// Page faults of the step with the fewest, once the heaps of all threads have grown.
int64_t least_page_faults(const comm::ProcessGroup& group, const ShardingOptions& options) {
  Tall model;
  FullyShardedDataParallel<Tall> sharded(model, group, options, model->units());
  optim::Adam adam(sharded.named_parameters());
  std::vector<int64_t> faults;
  for (int step = 0; step < 20; ++step) {
    const int64_t before = page_faults();
    sharded(at::arange(512.0, at::kFloat).add(step).cos().view({1, 512})).pow(2).sum().backward();
    adam.step(1e-3);
    adam.zero_grad();
    faults.push_back(page_faults() - before);
  }
  return *std::ranges::min_element(faults.begin() + 1, faults.end());
}

// Blocks of 8 MiB or more are given back to the system at once, and shorter ones never, so that
// only the former fault.
void expect_few_page_faults(const ShardingOptions& options) {
  test::ranks(2,
              [&](const comm::ProcessGroup& group) {
                ::mallopt(M_MMAP_THRESHOLD, 8 * kMiB);
                ::mallopt(M_TRIM_THRESHOLD, 1024 * kMiB);
                // The shortest unit has 2,304 pages.
                EXPECT_LE(least_page_faults(group, options), 500);
              },
              {.backend = "gloo"});
}

TEST(ShardingMemoryTest, UnitsThatAreGatheredTwiceFindTheirPages) {
  expect_few_page_faults({});
}

TEST(ShardingMemoryTest, UnitsThatAreGatheredOnceFindTheirPages) {
  expect_few_page_faults({.reshard_after_forward = false});
}

TEST(ShardingMemoryTest, GradientsThatTravelInAnotherTypeFindTheirPages) {
  expect_few_page_faults(
      {.shard = Shard::kGradients, .mixed_precision = {.reduce_dtype = at::kDouble}});
}

at::Tensor bytes_of(BufferPool& pool, int64_t bytes) {
  static const comm::ProcessGroup alone(comm::RankInfo{});
  return pool.empty(alone, bytes, at::kByte).fill_(1);
}

TEST(BufferPoolTest, ALongTensorGetsTheMemoryOfAnEarlierOne) {
  const auto pool = std::make_shared<BufferPool>();
  const void* first = bytes_of(*pool, 8 * kMiB).const_data_ptr();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % (2 * kMiB), 0)
      << "of huge pages, if there are any";
  const at::Tensor part = bytes_of(*pool, 6 * kMiB), rest = bytes_of(*pool, 2 * kMiB);
  EXPECT_EQ(part.const_data_ptr(), first);
  EXPECT_EQ(rest.const_data_ptr(), static_cast<const std::byte*>(first) + 6 * kMiB);
}

TEST(BufferPoolTest, HoldsNoMoreThanItsTensorsTookAtATime) {
  constexpr int64_t kOfOthers = kMiB;
  bytes_of(*std::make_shared<BufferPool>(), 2 * kMiB);
  const int64_t before = test::process_memory().mapped;
  const auto held = [&] { return test::process_memory().mapped - before; };
  auto pool = std::make_shared<BufferPool>();
  std::deque<at::Tensor> live;
  int64_t used = 0, most = 0;
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t bytes = 2 * (1 + i * i % 13) * kMiB;
    live.push_back(bytes_of(*pool, bytes));
    used += bytes;
    most = std::max(most, used);
    ASSERT_LE(held(), most + kOfOthers) << "tensor " << i;
    while (std::ssize(live) > i % 4) {
      used -= live.front().numel();
      live.pop_front();
    }
  }
  const at::Tensor last = bytes_of(*pool, 4 * kMiB);
  live.clear();
  pool.reset();
  EXPECT_TRUE(at::equal(last, at::ones_like(last))) << "a tensor may outlive all else";
  EXPECT_GE(held(), 4 * kMiB);
}

TEST(BufferPoolTest, PagesOfShortPiecesMakeALongOne) {
  const auto pool = std::make_shared<BufferPool>();
  at::Tensor kept;
  {
    const at::Tensor first = bytes_of(*pool, 6 * kMiB);
    kept = bytes_of(*pool, 2 * kMiB);
    const at::Tensor third = bytes_of(*pool, 6 * kMiB);
  }
  const int64_t before = page_faults();
  const at::Tensor whole = bytes_of(*pool, 12 * kMiB);
  EXPECT_LE(page_faults() - before, 50) << "of 3,072 pages";
  EXPECT_TRUE(at::equal(whole, at::ones_like(whole)));
  EXPECT_TRUE(at::equal(kept, at::ones_like(kept)));
}

// In a child: a limit of memory that programs write to refuses the new pages of a long tensor.
TEST(BufferPoolTest, WhatIsRefusedTakesNothing) {
  const auto refused = [] {
    const auto pool = std::make_shared<BufferPool>();
    {
      const at::Tensor first = bytes_of(*pool, 6 * kMiB), kept = bytes_of(*pool, 2 * kMiB);
      const at::Tensor third = bytes_of(*pool, 6 * kMiB);
    }
    int64_t text_and_more, data;
    std::ifstream statm("/proc/self/statm");
    for (int i = 0; i < 5; ++i) statm >> text_and_more;
    statm >> data;
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(data * ::getpagesize() + 8 * kMiB),
                       .rlim_max = RLIM_INFINITY};
    const int64_t before = test::process_memory().mapped;
    if (setrlimit(RLIMIT_DATA, &limit) != 0) std::_Exit(2);
    try {
      bytes_of(*pool, 64 * kMiB);
    } catch (const c10::OutOfMemoryError&) {
      std::_Exit(test::process_memory().mapped <= before + kMiB ? 0 : 3);
    }
    std::_Exit(4);
  };
  EXPECT_EXIT(refused(), testing::ExitedWithCode(0), "");
}

TEST(BufferPoolTest, GoesWithItsLastTensor) {
  const int64_t before = test::process_memory().mapped;
  bytes_of(*std::make_shared<BufferPool>(), 64 * kMiB);
  EXPECT_LE(test::process_memory().mapped - before, kMiB);
}

}  // namespace sharding_memory_test
}  // namespace cohort::parallel
