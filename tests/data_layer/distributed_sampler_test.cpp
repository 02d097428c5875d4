// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/distributed_sampler.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <numeric>
#include <set>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

#include "tests/support/message_of.h"

namespace cohort::data {
namespace distributed_sampler_test {

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

TEST(DistributedSamplerTest, RandomPaddingDiffersByEpochAndIsTheSameOnEveryRun) {
  const DistributedSamplerOptions options{
      .num_examples = 9, .world_size = 4, .seed = 3, .tail = Tail::kPadRandom};
  std::set<Indices> paddings;
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    const Indices all = all_ranks(options, epoch);
    ASSERT_EQ(all.size(), 12U);
    EXPECT_EQ(all, all_ranks(options, epoch));
    EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), 9U);
    // Places 9, 10 and 11 are the third example of ranks 1, 2 and 3.
    paddings.insert({all[5], all[8], all[11]});
  }
  EXPECT_GT(paddings.size(), 4U) << "8 epochs should not share their padding";
}

TEST(DistributedSamplerTest, FixedEpochSizeGoesOnWhereTheEpochBeforeEnded) {
  // 4 epochs of 5 examples of 10: two whole passes.
  for (int world_size : {1, 5}) {
    const DistributedSamplerOptions options{
        .num_examples = 10, .world_size = world_size, .seed = 2, .epoch_size = 5};
    Indices all;
    for (int64_t epoch = 0; epoch < 4; ++epoch) {
      const Indices some = all_ranks(options, epoch);
      ASSERT_EQ(some.size(), 5U);
      all.insert(all.end(), some.begin(), some.end());
    }
    EXPECT_EQ(std::set<int64_t>(all.begin(), all.begin() + 10).size(), 10U);
    EXPECT_EQ(std::set<int64_t>(all.begin() + 10, all.end()).size(), 10U);
  }
  // 3 ranks do not divide 5: of two epochs kUneven still makes one whole pass, padding repeats.
  for (const Tail tail : {Tail::kUneven, Tail::kPad}) {
    const DistributedSamplerOptions options{
        .num_examples = 10, .world_size = 3, .seed = 2, .tail = tail, .epoch_size = 5};
    Indices pass = all_ranks(options, 0);
    const Indices second = all_ranks(options, 1);
    pass.insert(pass.end(), second.begin(), second.end());
    EXPECT_EQ(pass.size(), tail == Tail::kUneven ? 10U : 12U);
    EXPECT_EQ(std::set<int64_t>(pass.begin(), pass.end()).size(), 10U);
  }
  // An epoch of more than a pass.
  const Indices long_epoch = all_ranks({.num_examples = 4, .world_size = 2, .epoch_size = 10});
  for (int64_t i = 0; i < 4; ++i) EXPECT_GE(std::count(long_epoch.begin(), long_epoch.end(), i), 2);
}

TEST(DistributedSamplerTest, EpochBegunByThreeRanksAndEndedByTwoHoldsEachExampleOnce) {
  constexpr int64_t kNumExamples = 26;
  constexpr int64_t kTaken = 4;  // By each of three ranks before the stop.
  for (const Tail tail : {Tail::kPad, Tail::kUneven, Tail::kDropLast}) {
    DistributedSamplerOptions options{
        .num_examples = kNumExamples, .world_size = 3, .seed = 11, .tail = tail};
    Indices seen;
    int64_t consumed = 0;
    for (options.rank = 0; options.rank < 3; ++options.rank) {
      DistributedSampler sampler(options);
      sampler.set_epoch(2);
      const Indices share = sampler.indices();
      seen.insert(seen.end(), share.begin(), share.begin() + kTaken);
      consumed = sampler.consumed_after(kTaken);
    }
    EXPECT_EQ(consumed, 12);
    options.world_size = 2;
    for (options.rank = 0; options.rank < 2; ++options.rank) {
      DistributedSampler sampler(options);
      sampler.set_epoch(2);
      sampler.resume(consumed);
      const Indices share = sampler.indices();
      EXPECT_EQ(static_cast<int64_t>(share.size()), 7);
      EXPECT_EQ(sampler.consumed_after(7), kNumExamples);
      seen.insert(seen.end(), share.begin(), share.end());
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, range(kNumExamples));
  }
}

TEST(DistributedSamplerTest, ResumeOnAsManyRanksGoesOnAsIfNeverStopped) {
  for_small_cases([](int64_t n, int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      DistributedSampler sampler({.num_examples = n, .rank = rank, .world_size = world_size});
      const Indices whole = sampler.indices();
      for (size_t taken = 0; taken < whole.size(); ++taken) {
        sampler.resume(0);
        sampler.resume(sampler.consumed_after(static_cast<int64_t>(taken)));
        EXPECT_EQ(sampler.indices(),
                  Indices(whole.begin() + static_cast<int64_t>(taken), whole.end()));
      }
    }
  });
}

TEST(DistributedSamplerTest, ResumeAfterTheLastExampleLeavesNothing) {
  DistributedSampler sampler({.num_examples = 7, .world_size = 3});
  sampler.resume(sampler.consumed_after(sampler.size()));
  EXPECT_EQ(sampler.size(), 0);
  EXPECT_TRUE(sampler.indices().empty());
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.size(), 3) << "a new epoch starts at its beginning";
}

TEST(DistributedSamplerTest, WeightsDecideHowOftenAnExampleComes) {
  const DistributedSamplerOptions options{
      .num_examples = 4, .world_size = 2, .seed = 4, .epoch_size = 40'000, .weights = {1, 0, 3, 4}};
  const Indices all = all_ranks(options);
  const auto count = [&](int64_t i) { return std::count(all.begin(), all.end(), i); };
  // Binomial, 40,000 draws: deviation at most 100 (p = 1/2); five of them either way.
  EXPECT_NEAR(static_cast<double>(count(0)), 5'000, 500);
  EXPECT_EQ(count(1), 0);
  EXPECT_NEAR(static_cast<double>(count(2)), 15'000, 500);
  EXPECT_NEAR(static_cast<double>(count(3)), 20'000, 500);
  EXPECT_NE(all, all_ranks(options, 1));
}

TEST(DistributedSamplerTest, WeightsWithoutReplacementDrawEachExampleOnce) {
  DistributedSamplerOptions options{.num_examples = 4,
                                    .epoch_size = 2,
                                    .weights = {1, 0, 3, 4},
                                    .draw = Draw::kWithoutReplacement};
  std::array<int, 4> first{};
  constexpr int kEpochs = 8'000;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Indices pair = all_ranks(options, epoch);
    ASSERT_EQ(pair.size(), 2U);
    EXPECT_NE(pair[0], pair[1]);
    EXPECT_NE(pair[0], 1);
    EXPECT_NE(pair[1], 1);
    ++first[static_cast<size_t>(pair[0])];
  }
  // The first draw is in proportion to the weights: deviation at most 45, five of them.
  EXPECT_NEAR(first[0], kEpochs / 8, 225);
  EXPECT_NEAR(first[3], kEpochs / 2, 225);
}

TEST(CutBatchesTest, KeepsOrDropsTheLast) {
  const Indices five = range(5);
  using Batches = std::vector<Indices>;
  EXPECT_EQ(cut_batches(five, 2), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(cut_batches(five, 2, LastBatch::kDrop), (Batches{{0, 1}, {2, 3}}));
  EXPECT_EQ(cut_batches(five, 5, LastBatch::kDrop), Batches{five});
  EXPECT_TRUE(cut_batches({}, 3).empty());
  EXPECT_THROW(cut_batches(five, 0), ConfigError);
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
  EXPECT_THROW(DistributedSampler({.num_examples = 1}).resume(-1), ConfigError);
  EXPECT_THROW(DistributedSampler({.num_examples = 1, .epoch_size = -1}), ConfigError);
}

TEST(DistributedSamplerTest, WeightsOfAnySizeCount) {
  const Indices huge =
      all_ranks({.num_examples = 3, .epoch_size = 300, .weights = {1e308, 1e308, 1e308}});
  const Indices tiny =
      all_ranks({.num_examples = 3, .epoch_size = 300, .weights = {4e-320, 4e-320, 4e-320}});
  for (const int64_t number : {0, 1, 2}) {
    EXPECT_GT(std::ranges::count(huge, number), 50);
    EXPECT_GT(std::ranges::count(tiny, number), 50);
  }
  EXPECT_EQ(all_ranks({.num_examples = 2,
                       .epoch_size = 1,
                       .weights = {0, 1e-320},
                       .draw = Draw::kWithoutReplacement}),
            (Indices{1}));
}

TEST(DistributedSamplerTest, PaddingIsDrawnByTheWeights) {
  const DistributedSamplerOptions options{
      .num_examples = 3, .world_size = 4, .tail = Tail::kPadRandom, .weights = {0, 1, 1}};
  Indices padded;
  for (int64_t epoch = 0; epoch < 50; ++epoch) {
    const Indices all = all_ranks(options, epoch);
    ASSERT_EQ(all.size(), 4U);
    EXPECT_EQ(std::ranges::count(all, 0), 0);
    padded.push_back(all.back());
  }
  EXPECT_GT(std::ranges::count(padded, 1), 5);
  EXPECT_GT(std::ranges::count(padded, 2), 5);
}

TEST(DistributedSamplerTest, RefusesBadWeights) {
  const auto expect = [](const DistributedSamplerOptions& options, const std::string& text) {
    const std::string message =
        test::message_of<ConfigError>([&] { DistributedSampler sampler(options); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect({.num_examples = 3, .weights = {1, 2}}, "each of 3 examples, got 2");
  expect({.num_examples = 2, .weights = {1, -2}}, "got -2.000000 for example 1");
  expect({.num_examples = 2, .weights = {0, 0}}, "at least 1 weights above 0, got 0");
  expect({.num_examples = 2, .weights = {1, 0}, .draw = Draw::kWithoutReplacement},
         "at least 2 weights above 0, got 1");
  expect({.num_examples = 2, .shuffle = false, .weights = {1, 1}}, "expected shuffle = true");
}

}  // namespace distributed_sampler_test
}  // namespace cohort::data
