// SPDX-License-Identifier: Apache-2.0
// One of two ranks is killed while both save, before each of its calls:
// tests/base/killed_save_test.cpp with a group.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/base/env.h"
#include "cohort/base/program.h"
#include "cohort/train/sharded_checkpoint.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/kill_at.h"
#include "tests/support/ranks.h"

namespace cohort::train {
namespace killed_rank_test {

constexpr int64_t kSize = 10;

// Both ranks save numbers that are all `value`, which numbers the update, too; rank `victim` is
// killed before call `kill_at`. The parent says which in the environment.
void save_and_be_killed(const comm::ProcessGroup& group) {
  const std::string folder = *env_string("COHORT_TEST_FOLDER");
  if (group.rank() == *env_int("COHORT_TEST_VICTIM"))
    test::kill_at(folder, static_cast<int>(*env_int("COHORT_TEST_KILL_AT")));
  const int64_t value = *env_int("COHORT_TEST_VALUE");
  const ShardedParts state{
      {"weights", full_shards({{"w", at::full(kSize, static_cast<double>(value))}})}};
  ShardedCheckpointWriter writer(group);
  writer.begin(folder, share_of(state, group.rank(), group.size()), value, {});
  writer.commit();
}

std::vector<test::RankEnd> save(const std::string& folder, int value, int victim, int kill_at) {
  ::setenv("COHORT_TEST_FOLDER", folder.c_str(), 1);
  ::setenv("COHORT_TEST_VALUE", std::to_string(value).c_str(), 1);
  ::setenv("COHORT_TEST_VICTIM", std::to_string(victim).c_str(), 1);
  ::setenv("COHORT_TEST_KILL_AT", std::to_string(kill_at).c_str(), 1);
  return test::run_ranks(2, save_and_be_killed);
}

// Returns how often the rank was killed, and what was found afterwards.
int kill_rank(int victim, std::vector<double>& found) {
  if (env_string("COHORT_TEST_RANK")) test::run_ranks(2, save_and_be_killed);  // never returns
  for (int kills = 0;; ++kills) {
    const TemporaryFolder temporary;
    const std::string folder = temporary / "last";
    save_checkpoint(folder, {{"weights", {{"w", at::ones(kSize)}}}}, 1, {});
    const auto ends = save(folder, 2, victim, 1 + kills);
    at::Tensor values = at::zeros(kSize);
    load_checkpoint(folder, {{"weights", {{"w", values}}}});
    EXPECT_TRUE(values.eq(values[0]).all().item<bool>()) << "parts of two saves: " << values;
    found.push_back(values[0].item<double>());
    const auto& end = ends[static_cast<size_t>(victim)];
    const auto& other = ends[static_cast<size_t>(1 - victim)];
    if (end.exit_code == 0) {
      EXPECT_EQ(other.exit_code, 0) << other.output;
      return kills;
    }
    EXPECT_EQ(end.exit_code, 128 + 9) << end.output;
    // Rank 0 removes the files of before when the checkpoint is there: that nobody waits for.
    const bool may_have_ended = victim == 0 && found.back() == 2 && other.exit_code == kExitOk;
    EXPECT_EQ(other.exit_code, may_have_ended ? kExitOk : kExitLostPeer) << other.output;
    if (testing::Test::HasFailure()) return kills;
  }
}

// Rank 1 writes one file: open, a write (two kills), fsync, close, rename, and the folder's open,
// fsync, close. It is no checkpoint yet.
TEST(KilledRankTest, AWriterKilledLeavesTheCheckpointBefore) {
  std::vector<double> found;
  EXPECT_GE(kill_rank(1, found), 9);
  EXPECT_EQ(std::count(found.begin(), found.end(), 1), std::ssize(found) - 1);
  EXPECT_EQ(found.back(), 2);
}

// Rank 0 writes a file and the manifest, and removes one.
TEST(KilledRankTest, RankZeroKilledLeavesTheCheckpointBeforeOrTheNewOne) {
  std::vector<double> found;
  EXPECT_GE(kill_rank(0, found), 9 + 9 + 1);
  EXPECT_EQ(found.front(), 1);
  EXPECT_EQ(found.back(), 2);
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
}

}  // namespace killed_rank_test
}  // namespace cohort::train
