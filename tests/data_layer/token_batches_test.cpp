// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/token_batches.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

namespace cohort::data {
namespace token_batches_test {

// Lengths like those of sentences: target 1 to 60, source near it.
std::vector<PairLength> some_lengths(size_t n, uint64_t seed = 1) {
  SplitMix64 random(seed);
  std::vector<PairLength> lengths(n);
  for (auto& [source, target] : lengths) {
    target = static_cast<int32_t>(1 + random.below(30) + random.below(31));
    source = std::max(1, target + static_cast<int32_t>(random.below(9)) - 4);
  }
  return lengths;
}

std::vector<BatchPlan> all_ranks(const std::vector<PairLength>& lengths, BatchOptions options,
                                 int64_t epoch = 0) {
  std::vector<BatchPlan> plans;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    plans.push_back(plan_batches(lengths, options, epoch));
  }
  return plans;
}

// Batches as lists, to be compared.
std::vector<std::vector<int64_t>> lists(const Batches& batches) {
  std::vector<std::vector<int64_t>> result;
  for (const auto batch : batches) result.emplace_back(batch.begin(), batch.end());
  return result;
}

std::vector<int64_t> sorted_sentences(const std::vector<BatchPlan>& plans) {
  std::vector<int64_t> all;
  for (const auto& plan : plans) {
    for (const auto batch : plan.batches) all.insert(all.end(), batch.begin(), batch.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

int64_t longest_target(const std::vector<PairLength>& lengths, std::span<const int32_t> batch) {
  int64_t longest = 0;
  for (const int32_t i : batch)
    longest = std::max<int64_t>(longest, lengths[static_cast<size_t>(i)].target);
  return longest;
}

int64_t width(const std::vector<PairLength>& lengths, std::span<const int32_t> batch) {
  int64_t widest = longest_target(lengths, batch);
  for (const int32_t i : batch)
    widest = std::max<int64_t>(widest, lengths[static_cast<size_t>(i)].source);
  return widest;
}

std::vector<int64_t> range(size_t n) {
  std::vector<int64_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

TEST(PlanBatchesTest, EverySentenceIsInOneBatchOfOneRankAndRanksTakeEqualSteps) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (size_t n = static_cast<size_t>(world_size); n <= 90; ++n) {
      for (const auto& [rows, words] : {std::pair{4, 0}, {0, 150}, {5, 120}, {1, 0}}) {
        SCOPED_TRACE(testing::Message()
                     << "W " << world_size << " N " << n << " rows " << rows << " words " << words);
        const auto lengths = some_lengths(n, n);
        const auto plans = all_ranks(lengths, {.mini_batch = rows,
                                               .mini_batch_words = words,
                                               .maxi_batch = 3,
                                               .world_size = world_size});
        const auto sentences = sorted_sentences(plans);
        ASSERT_EQ(std::adjacent_find(sentences.begin(), sentences.end()), sentences.end());
        ASSERT_EQ(sentences.size() + static_cast<size_t>(plans[0].num_dropped), n);
        ASSERT_LT(plans[0].num_dropped, world_size);
        if (plans[0].num_dropped == 0) {
          ASSERT_EQ(sentences, range(n));
        }
        std::vector<int64_t> tokens(plans[0].batches.size());
        for (const auto& plan : plans) {
          for (size_t i = 0; i < plan.batches.size(); ++i)
            for (const int32_t sentence : plan.batches[i])
              tokens[i] += lengths[static_cast<size_t>(sentence)].target;
        }
        for (const auto& plan : plans) {
          ASSERT_EQ(plan.step_target_tokens, tokens);
          ASSERT_EQ(plan.batches.size(), plans[0].batches.size());
          ASSERT_EQ(plan.num_sentences, static_cast<int64_t>(sentences.size()));
          for (const auto batch : plan.batches) {
            ASSERT_FALSE(batch.empty());
            const auto size = static_cast<int64_t>(batch.size());
            if (rows > 0) {
              ASSERT_LE(size, rows);
            }
            if (words > 0 && size > 1) {
              ASSERT_LE(size * longest_target(lengths, batch), words);
            }
          }
        }
      }
    }
  }
}

TEST(PlanBatchesTest, AnUpdateDependsOnRanksTimesDelayAlone) {
  const auto lengths = some_lengths(700);
  // Updates as lists of batches: batch i of an update is that of rank i % W.
  const auto updates = [&](int world_size, int64_t delay) {
    const auto plans = all_ranks(
        lengths,
        {.mini_batch_words = 90, .optimizer_delay = delay, .seed = 5, .world_size = world_size});
    std::vector<std::vector<int32_t>> batches;
    for (size_t i = 0; i < plans[0].batches.size(); ++i) {
      for (const auto& plan : plans)
        batches.emplace_back(plan.batches[i].begin(), plan.batches[i].end());
    }
    EXPECT_EQ(plans[0].batches.size() % static_cast<size_t>(delay), 0);
    return batches;
  };
  const auto expected = updates(1, 6);
  EXPECT_EQ(updates(2, 3), expected);
  EXPECT_EQ(updates(3, 2), expected);
  EXPECT_EQ(updates(6, 1), expected);
  EXPECT_NE(updates(5, 1), expected);
}

TEST(PlanBatchesTest, EqualArgumentsGiveEqualPlansAndEpochsDiffer) {
  const auto lengths = some_lengths(500);
  const BatchOptions options{.mini_batch_words = 300, .seed = 3, .world_size = 2};
  const auto plan = [&](int64_t epoch) {
    return lists(plan_batches(lengths, options, epoch).batches);
  };
  EXPECT_EQ(plan(2), plan(2));
  EXPECT_NE(plan(2), plan(3));
}

TEST(PlanBatchesTest, SortingKeepsPaddingToAFewPercent) {
  const auto lengths = some_lengths(20'000);
  const BatchOptions options{.mini_batch_words = 1000, .world_size = 2};
  auto unsorted = options;
  unsorted.maxi_batch = 1;
  const BatchPlan plan = plan_batches(lengths, options, 0);
  EXPECT_LT(plan.padding_share, 0.08);
  EXPECT_GT(plan_batches(lengths, unsorted, 0).padding_share, 0.3);
  // The share, counted again.
  int64_t tokens = 0;
  for (const auto& [source, target] : lengths) tokens += source + target;
  EXPECT_EQ(plan.source_tokens + plan.target_tokens, tokens);
}

TEST(PlanBatchesTest, RanksOfAStepHaveSimilarWork) {
  const auto lengths = some_lengths(20'000);
  const auto plans = all_ranks(lengths, {.mini_batch_words = 1000, .world_size = 3});
  // The last step is cut from what was left, and window borders may be uneven.
  int64_t uneven = 0;
  for (size_t step = 0; step < plans[0].batches.size(); ++step) {
    int64_t least = INT64_MAX;
    int64_t most = 0;
    for (const auto& plan : plans) {
      const auto batch = plan.batches[step];
      const auto work = static_cast<int64_t>(batch.size()) * width(lengths, batch);
      least = std::min(least, work);
      most = std::max(most, work);
    }
    if (least * 10 < most * 9) ++uneven;
  }
  EXPECT_LE(uneven * 50, static_cast<int64_t>(plans[0].batches.size()));  // 2 %.
}

TEST(PlanBatchesTest, RanksOfAnEpochHaveEqualWork) {
  const auto lengths = some_lengths(20'000);
  for (const auto& [rows, words] : {std::pair{64, 0}, {0, 1000}}) {
    int64_t least = INT64_MAX;
    int64_t most = 0;
    for (const auto& plan :
         all_ranks(lengths, {.mini_batch = rows, .mini_batch_words = words, .world_size = 4})) {
      int64_t work = 0;
      for (const auto batch : plan.batches) work += std::ssize(batch) * width(lengths, batch);
      least = std::min(least, work);
      most = std::max(most, work);
    }
    EXPECT_LT(most * 100, least * 101) << rows << " rows, " << words << " words";
  }
}

// Rows x (longest source + longest target).
int64_t cost(const std::vector<PairLength>& lengths, std::span<const int32_t> batch) {
  int64_t longest_source = 0;
  for (const int32_t i : batch)
    longest_source = std::max<int64_t>(longest_source, lengths[static_cast<size_t>(i)].source);
  return std::ssize(batch) * (longest_source + longest_target(lengths, batch));
}

TEST(PlanBatchesTest, TheFirstEpochBeginsWithTheDearestUpdateThenTheLongestSentence) {
  auto lengths = some_lengths(5'000);
  // With a budget of target tokens the dearest batch has many short targets of long sources; the
  // longest sentence is alone in a batch, or nearly so.
  for (size_t i = 0; i < 200; ++i) lengths[i * 7] = {50, 3};
  lengths[4'321] = {5, 90};
  for (const auto& [rows, words] : {std::pair{20, 0}, {0, 300}}) {
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      const auto plans = all_ranks(
          lengths, {.mini_batch = rows, .mini_batch_words = words, .world_size = 2}, epoch);
      int64_t dearest = 0;
      for (const auto& plan : plans) {
        for (const auto batch : plan.batches) dearest = std::max(dearest, cost(lengths, batch));
      }
      int64_t first = 0;
      int64_t longest = 0;
      for (const auto& plan : plans) {
        first = std::max(first, cost(lengths, plan.batches[0]));
        for (size_t update = 0; update < 2; ++update)
          longest = std::max(longest, width(lengths, plan.batches[update]));
      }
      EXPECT_EQ(first == dearest, epoch == 0) << rows << " " << words << " epoch " << epoch;
      EXPECT_EQ(longest == 90, epoch == 0) << rows << " " << words << " epoch " << epoch;
    }
  }
  // One update alone is both.
  EXPECT_EQ(
      plan_batches(std::vector<PairLength>{{1, 1}, {2, 9}}, {.mini_batch = 5}, 0).batches.size(),
      1U);
}

TEST(PlanBatchesTest, RowsThatFitAreALimitByLength) {
  const auto lengths = some_lengths(3'000);
  // Up to 10 tokens 40 rows, up to 20 tokens 20, ... up to 70 tokens 2.
  const BatchOptions options{.fit_rows = {40, 20, 13, 8, 5, 3, 2}, .world_size = 2};
  const auto plans = all_ranks(lengths, options);
  EXPECT_EQ(sorted_sentences(plans), range(lengths.size()));
  int64_t full = 0;
  for (const auto& plan : plans) {
    for (const auto batch : plan.batches) {
      const auto most = options.fit_rows[static_cast<size_t>((width(lengths, batch) - 1) / 10)];
      ASSERT_LE(std::ssize(batch), most);
      full += std::ssize(batch) == most;
    }
  }
  EXPECT_GT(full * 10, std::ssize(plans[0].batches) * 2 * 8) << "most batches are full";
  EXPECT_THROW(plan_batches(lengths, {.fit_rows = {40, 20}}, 0), ConfigError) << "too short";
  EXPECT_THROW(plan_batches(lengths, {.fit_rows = {4, 5, 5, 5, 5, 5, 5}}, 0), ConfigError);
}

// 5 million pairs: the plan's own memory is what its header says.
TEST(PlanBatchesTest, APlanHasFourBytesASentenceAndSixteenABatch) {
  const auto lengths = some_lengths(1'000);
  const auto plan = plan_batches(lengths, {.mini_batch = 10}, 0);
  EXPECT_LE(plan.batches.size_bytes(), 1'000 * 4 + (100 + 1) * 16);
}

TEST(PlanBatchesTest, StepsDoNotComeInTheOrderOfLength) {
  const auto lengths = some_lengths(5'000);
  const auto plan = plan_batches(lengths, {.mini_batch = 50, .maxi_batch = 1000}, 0);
  int rising = 0;
  for (size_t i = 1; i < plan.batches.size(); ++i) {
    rising += width(lengths, plan.batches[i]) >= width(lengths, plan.batches[i - 1]);
  }
  EXPECT_GT(rising, 25);  // Of 99; a random order has about half.
  EXPECT_LT(rising, 75);
}

TEST(PlanBatchesTest, ASentenceLongerThanTheBudgetIsABatchOfItsOwn) {
  const std::vector<PairLength> lengths = {{5, 5}, {5, 5}, {5, 500}, {5, 5}, {0, 0}};
  const auto plan = plan_batches(lengths, {.mini_batch_words = 20, .shuffle = false}, 0);
  EXPECT_EQ(lists(plan.batches), (std::vector<std::vector<int64_t>>{{4, 0, 1, 3}, {2}}));
  EXPECT_EQ(plan.num_sentences, 5);
}

TEST(PlanBatchesTest, TheBudgetCountsTheTargetSide) {
  const std::vector<PairLength> lengths(4, {1, 10});
  const auto plan = plan_batches(lengths, {.mini_batch_words = 20, .shuffle = false}, 0);
  EXPECT_EQ(lists(plan.batches), (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}));
  const std::vector<PairLength> swapped(4, {10, 1});
  EXPECT_EQ(plan_batches(swapped, {.mini_batch_words = 20, .shuffle = false}, 0).batches.size(),
            1U);
}

TEST(PlanBatchesTest, RefusesBadOptions) {
  const auto lengths = some_lengths(4);
  EXPECT_THROW(plan_batches(lengths, {}, 0), ConfigError);
  EXPECT_THROW(plan_batches(lengths, {.mini_batch = -1}, 0), ConfigError);
  EXPECT_THROW(plan_batches(lengths, {.mini_batch = 1, .maxi_batch = 0}, 0), ConfigError);
  EXPECT_THROW(plan_batches(lengths, {.mini_batch = 1}, -1), ConfigError);
  EXPECT_THROW(plan_batches(lengths, {.mini_batch = 1, .world_size = 5}, 0), ConfigError);
  EXPECT_THROW(plan_batches(lengths, {.mini_batch = 1, .rank = 1}, 0), ConfigError);
  EXPECT_THROW(plan_batches(std::vector<PairLength>{{1, -1}}, {.mini_batch = 1}, 0), ConfigError);
}

// Trains parts of an epoch, each of some batches on some ranks; returns how often each sentence
// came and what the last plan left out.
std::pair<std::vector<int>, int64_t> train_parts(
    const std::vector<PairLength>& lengths, const std::vector<std::pair<int, int64_t>>& parts) {
  std::vector<int> times(lengths.size());
  std::vector<EpochPart> done;
  int64_t num_dropped = 0;
  for (const auto& [world_size, wanted] : parts) {
    BatchOptions options{.mini_batch_words = 90, .maxi_batch = 3, .world_size = world_size};
    int64_t taken = 0;
    for (options.rank = 0; options.rank < world_size; ++options.rank) {
      const BatchPlan plan = plan_rest(lengths, options, 2, done);
      taken = std::min(wanted, std::ssize(plan.batches));
      num_dropped = plan.num_dropped;
      for (int64_t k = 0; k < taken; ++k) {
        for (const int32_t i : plan.batches[static_cast<size_t>(k)])
          ++times[static_cast<size_t>(i)];
      }
    }
    options.rank = 0;  // The rank that saved need not be the one that asks.
    done.push_back({options, taken});
  }
  return {times, num_dropped};
}

TEST(PlanRestTest, TheSameRanksGoOnWithTheSamePlan) {
  const auto lengths = some_lengths(200);
  for (int rank = 0; rank < 3; ++rank) {
    const BatchOptions options{.mini_batch = 5, .seed = 7, .rank = rank, .world_size = 3};
    auto expected = lists(plan_batches(lengths, options, 4).batches);
    BatchOptions saved = options;
    saved.rank = 0;
    const std::vector<EpochPart> done{{saved, 6}};
    expected.erase(expected.begin(), expected.begin() + 6);
    EXPECT_EQ(lists(plan_rest(lengths, options, 4, done).batches), expected);
  }
}

TEST(PlanRestTest, OtherRanksGoOnWithTheSentencesThatAreLeft) {
  constexpr int64_t kAll = 1'000'000;
  const auto lengths = some_lengths(300);
  for (const auto& parts : {std::vector<std::pair<int, int64_t>>{{2, 7}, {3, kAll}},
                            {{3, 5}, {1, 4}, {2, kAll}},
                            {{2, 0}, {4, kAll}},
                            {{1, 3}, {4, kAll}, {2, kAll}}}) {
    const auto [times, num_dropped] = train_parts(lengths, parts);
    EXPECT_EQ(std::ranges::count(times, 1), std::ssize(lengths) - num_dropped);
    EXPECT_EQ(std::ranges::count(times, 0), num_dropped);
    EXPECT_LT(num_dropped, 4) << "fewer than there are ranks";
  }
}

TEST(PlanRestTest, RefusesMoreThanAnEpochHas) {
  const BatchOptions options{.mini_batch = 5, .world_size = 2};
  const std::vector<EpochPart> done{{options, 11}};
  EXPECT_THROW(plan_rest(some_lengths(100), options, 0, done), ConfigError);
}

TEST(PlanEvalBatchesTest, EachSentenceComesOnceAcrossRanks) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (size_t n = 0; n <= 30; ++n) {
      const auto lengths = some_lengths(n);
      std::vector<BatchPlan> plans;
      for (int rank = 0; rank < world_size; ++rank) {
        plans.push_back(plan_eval_batches(lengths, 100, rank, world_size));
      }
      EXPECT_EQ(sorted_sentences(plans), range(n));
      EXPECT_LE(plans.front().batches.size() - plans.back().batches.size(), 1U);
    }
  }
}

}  // namespace token_batches_test
}  // namespace cohort::data
