// Training with shared-out state against one process that holds everything.
#include <gtest/gtest.h>

#include "cohort/parallel/sharding/flat_layout.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace {

using test::sharding::expect_plain_training;

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
