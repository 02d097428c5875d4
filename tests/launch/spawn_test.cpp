// A program that starts itself once per rank.
#include <gtest/gtest.h>

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace {

TEST(SpawnTest, TheProgramRunsAgainOncePerRank) {
  Launched run({this_program(), "--worker", "spawn-well"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines(ended.out),
            (std::vector<std::string>{"[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"}));
}

TEST(SpawnTest, AFailingRankIsReportedUnderTheProgramsName) {
  Launched run({this_program(), "--worker", "spawn-fail"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_NE(ended.err.find(": rank 1 (pid "), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find(") exited with code 7\n"), std::string::npos) << ended.err;
  EXPECT_EQ(ended.err.find("cohort run"), std::string::npos) << ended.err;
}

TEST(SpawnTest, AProgramThatHasThreadsIsRefused) {
  Launched run({this_program(), "--worker", "threaded"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err,
            "spawner: error: spawn: expected to be called before the program starts threads, got 2 "
            "threads\n");
}

}  // namespace
}  // namespace cohort::launch
