// A program that starts itself once per rank.
#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/launch/signals.h"

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace spawn_test {

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

TEST(SignalsTest, WhatWasIgnoredBeforeIsIgnoredAfterwards) {
  for (const int signal : {SIGCHLD, SIGPIPE}) {
    struct sigaction ignore {}, before {}, after {};
    ignore.sa_handler = SIG_IGN;
    ASSERT_EQ(::sigaction(signal, &ignore, &before), 0);
    { const Signals signals; }
    ASSERT_EQ(::sigaction(signal, &before, &after), 0);
    EXPECT_EQ(after.sa_handler, SIG_IGN) << "signal " << signal;
  }
}

}  // namespace spawn_test
}  // namespace cohort::launch
