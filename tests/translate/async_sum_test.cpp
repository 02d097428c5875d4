// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/async_sum.h"

#include <chrono>
#include <gtest/gtest.h>
#include <sstream>

#include "cohort/base/error.h"

#include "tests/support/ranks.h"

namespace cohort::translate {
namespace async_sum_test {

using Numbers = std::vector<double>;

// A rank that adds 1 and its rank to each round it joins while it works, then nothing.
struct Worker {
  explicit Worker(const comm::ProcessGroup& group)
      : rank(group.rank()),
        sum(
            group, 2,
            [this] {
              if (!works) return Numbers{0, 0};
              given[0] += 1;
              given[1] += rank;
              return Numbers{1, static_cast<double>(rank)};
            },
            [this](const Numbers& own, const Numbers& sums) {
              taken[0] += sums[0];
              taken[1] += sums[1];
              own_taken += own[0];
              rounds << sums[0] << ' ' << sums[1] << '\n';
            }) {}

  void synchronize() {
    works = false;
    sum.synchronize();
  }

  const int rank;
  bool works = true;
  Numbers given{0, 0}, taken{0, 0};
  double own_taken = 0;
  std::ostringstream rounds;
  AsyncSum sum;
};

// Twice, and the second time other ranks have more to give.
TEST(AsyncSumTest, RanksOfAnyPaceTakeTheSameRoundsAndAllThatWasGiven) {
  test::ranks(3, [](const comm::ProcessGroup& group) {
    Worker worker(group);
    for (const int phase : {0, 1}) {
      worker.works = true;
      const double most = worker.given[0] + 4 * (1 + (group.rank() + phase) % 3);
      while (worker.given[0] < most) worker.sum.poll();
      worker.synchronize();
      for (const size_t i : {0, 1})
        EXPECT_EQ(worker.taken[i], group.all_reduce_sum(static_cast<int64_t>(worker.given[i])));
      EXPECT_EQ(worker.own_taken, worker.given[0]);
      const auto all = group.all_gather_object(worker.rounds.str());
      EXPECT_EQ(all[0], all[1]);
      EXPECT_EQ(all[0], all[2]);
    }
  });
}

TEST(AsyncSumTest, APollWaitsForNoRank) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Worker worker(group);
    if (group.rank() == 1) {
      for (int i = 0; i < 1000; ++i) worker.sum.poll();
      EXPECT_EQ(worker.given[0], 1) << "rank 0 has not joined the first round";
    }
    group.barrier("rank 1 has polled");
    worker.synchronize();
    EXPECT_EQ(worker.taken[0], 1);
  });
}

TEST(AsyncSumTest, OneRankIsAllRanks) {
  comm::ProcessGroup alone(comm::RankInfo{});
  Worker worker(alone);
  for (int i = 0; i < 5; ++i) worker.sum.poll();
  worker.synchronize();
  EXPECT_GT(worker.given[0], 0);
  EXPECT_EQ(worker.taken[0], worker.given[0]);
}

TEST(AsyncSumTest, ALostRankIsAnErrorOfTheOthers) {
  const auto ends = test::run_ranks(2, [](const comm::ProcessGroup& group) {
    Worker worker(group);
    if (group.rank() == 1) std::_Exit(7);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(40);
    while (std::chrono::steady_clock::now() < deadline) worker.sum.poll();
  });
  EXPECT_EQ(ends[1].exit_code, 7) << ends[1].output;
  EXPECT_EQ(ends[0].exit_code, 3) << ends[0].output;
  EXPECT_NE(ends[0].output.find("lost rank 1"), std::string::npos) << ends[0].output;
}

}  // namespace async_sum_test
}  // namespace cohort::translate
