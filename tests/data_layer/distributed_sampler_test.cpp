#include "cohort/data/distributed_sampler.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <numeric>
#include <set>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

namespace cohort::data {
namespace {

using Indices = std::vector<int64_t>;

Indices all_ranks(DistributedSamplerOptions options, int64_t epoch = 0) {
  Indices all;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    DistributedSampler sampler(options);
    sampler.set_epoch(epoch);
    const Indices share = sampler.indices();
    EXPECT_EQ(static_cast<int64_t>(share.size()), sampler.size());
    all.insert(all.end(), share.begin(), share.end());
  }
  return all;
}

// Calls body(N, W) for all small cases.
template <class Body>
void for_small_cases(Body body) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (int64_t n = 1; n <= 13; ++n) {
      SCOPED_TRACE("N " + std::to_string(n) + " W " + std::to_string(world_size));
      body(n, world_size);
    }
  }
}

Indices range(int64_t n) {
  Indices numbers(static_cast<size_t>(n));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

TEST(DistributedSamplerTest, PaddedSharesAreEqualAndCoverEveryExample) {
  for_small_cases([](int64_t n, int world_size) {
    const Indices all = all_ranks({.num_examples = n, .world_size = world_size});
    EXPECT_EQ(static_cast<int64_t>(all.size()), (n + world_size - 1) / world_size * world_size);
    const std::set<int64_t> different(all.begin(), all.end());
    EXPECT_EQ(Indices(different.begin(), different.end()), range(n));
  });
}

TEST(DistributedSamplerTest, UnevenSharesHoldEveryExampleExactlyOnce) {
  for_small_cases([](int64_t n, int world_size) {
    Indices all = all_ranks({.num_examples = n, .world_size = world_size, .tail = Tail::kUneven});
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, range(n));
    const DistributedSampler first(
        {.num_examples = n, .rank = 0, .world_size = world_size, .tail = Tail::kUneven});
    const DistributedSampler last({.num_examples = n,
                                   .rank = world_size - 1,
                                   .world_size = world_size,
                                   .tail = Tail::kUneven});
    EXPECT_LE(first.size() - last.size(), 1);
  });
}

TEST(DistributedSamplerTest, DroppedTailLeavesEqualSharesWithoutRepeats) {
  for_small_cases([](int64_t n, int world_size) {
    const DistributedSamplerOptions options{
        .num_examples = n, .world_size = world_size, .tail = Tail::kDropLast};
    if (n < world_size) {
      EXPECT_THROW(DistributedSampler{options}, ConfigError);
      return;
    }
    const Indices all = all_ranks(options);
    EXPECT_EQ(static_cast<int64_t>(all.size()), n / world_size * world_size);
    EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), all.size());
  });
}

TEST(DistributedSamplerTest, WithoutShuffleRanksStrideAsInPyTorch) {
  const auto share = [](int rank) {
    return DistributedSampler({.num_examples = 7, .rank = rank, .world_size = 3, .shuffle = false})
        .indices();
  };
  EXPECT_EQ(share(0), (Indices{0, 3, 6}));
  EXPECT_EQ(share(1), (Indices{1, 4, 0}));
  EXPECT_EQ(share(2), (Indices{2, 5, 1}));
}

TEST(DistributedSamplerTest, SeedAndEpochDecideTheOrder) {
  const DistributedSamplerOptions options{.num_examples = 100, .world_size = 2, .seed = 5};
  auto other_seed = options;
  other_seed.seed = 6;
  EXPECT_EQ(all_ranks(options, 3), all_ranks(options, 3));
  EXPECT_NE(all_ranks(options, 3), all_ranks(options, 4));
  EXPECT_NE(all_ranks(options, 3), all_ranks(other_seed, 3));
  // Seed s with epoch e is not seed s+1 with epoch e-1.
  EXPECT_NE(all_ranks(options, 3), all_ranks(other_seed, 2));
}

TEST(DistributedSamplerTest, WorldSizesShareOneGlobalOrder) {
  const DistributedSamplerOptions one{.num_examples = 12, .seed = 1};
  DistributedSamplerOptions two = one;
  two.world_size = 2;
  const Indices order = DistributedSampler(one).indices();
  for (two.rank = 0; two.rank < 2; ++two.rank) {
    const Indices share = DistributedSampler(two).indices();
    for (size_t i = 0; i < share.size(); ++i) {
      EXPECT_EQ(share[i], order[2 * i + static_cast<size_t>(two.rank)]);
    }
  }
}

// Recorded from this code. If it ever fails, data orders of old runs can no longer be repeated.
TEST(DistributedSamplerTest, OrderIsTheRecordedOne) {
  DistributedSampler sampler({.num_examples = 10, .seed = 42});
  EXPECT_EQ(sampler.indices(), (Indices{6, 1, 8, 5, 2, 7, 4, 3, 9, 0}));
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.indices(), (Indices{9, 0, 5, 3, 7, 2, 8, 1, 6, 4}));
}

// The first outputs for seed 1234567 of the generator's published reference program.
TEST(SplitMix64Test, EqualsThePublishedSequence) {
  SplitMix64 random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317U);
  EXPECT_EQ(random.next(), 3203168211198807973U);
  EXPECT_EQ(random.next(), 9817491932198370423U);
  EXPECT_EQ(random.next(), 4593380528125082431U);
}

TEST(SplitMix64Test, ShuffleGivesEachOrderEquallyOften) {
  std::array<int, 24> counts{};
  SplitMix64 random(7);
  constexpr int kDraws = 24'000;
  for (int i = 0; i < kDraws; ++i) {
    std::array<int, 4> items = {0, 1, 2, 3};
    shuffle(std::span<int>(items), random);
    int place = 0;  // Of this order among all 24.
    for (size_t a = 0; a < 4; ++a) {
      int smaller = 0;
      for (size_t b = a + 1; b < 4; ++b) smaller += items[b] < items[a];
      place = place * static_cast<int>(4 - a) + smaller;
    }
    ++counts[static_cast<size_t>(place)];
  }
  // Binomial: mean 1000, deviation sqrt(24000 * 1/24 * 23/24) = 31; five of them either way.
  for (int count : counts) EXPECT_NEAR(count, kDraws / 24, 155);
}

TEST(DistributedSamplerTest, RefusesBadOptions) {
  EXPECT_THROW(DistributedSampler({.num_examples = 0}), ConfigError);
  EXPECT_THROW(DistributedSampler({.num_examples = 1, .world_size = 0}), ConfigError);
  EXPECT_THROW(DistributedSampler({.num_examples = 1, .rank = 2, .world_size = 2}), ConfigError);
  EXPECT_THROW(DistributedSampler({.num_examples = 1, .rank = -1}), ConfigError);
  EXPECT_THROW(DistributedSampler({.num_examples = 1}).set_epoch(-1), ConfigError);
}

}  // namespace
}  // namespace cohort::data
