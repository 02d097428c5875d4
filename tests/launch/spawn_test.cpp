// SPDX-License-Identifier: Apache-2.0
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
  for (const char* worker : {"threaded", "threaded-fork"}) {
    Launched run({this_program(), "--worker", worker});
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_EQ(ended.err,
              "spawner: error: spawn: expected to be called before the program starts threads, got "
              "2 threads\n");
  }
}

TEST(SpawnTest, AFunctionRunsInAForkForEachRank) {
  Launched run({this_program(), "--worker", "fork-well"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines(ended.out),
            (std::vector<std::string>{"[rank 0] rank 0 of 2 is local rank 0, seen by both, spawned",
                                      "[rank 1] rank 1 of 2 is local rank 1, seen by both, spawned",
                                      "before the fork", "on its own after the end"}));
}

TEST(SpawnTest, AForkHasRank0sStoreAndNoOtherDescriptor) {
  Launched run({this_program(), "--worker", "fork-store"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_NE(ended.out.find("rank 0 listens on MASTER_PORT, 0 others\n"), std::string::npos)
      << ended.out;
  EXPECT_NE(ended.out.find("rank 1 has none, 0 others\n"), std::string::npos) << ended.out;
}

TEST(SpawnTest, AnExceptionInAForkIsReportedWithItsText) {
  Launched run({this_program(), "--worker", "fork-throw"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.err.find(": rank 1 (pid "), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find(") exited with code 2: no such flag\n"), std::string::npos) << ended.err;
}

TEST(SpawnTest, AForkEndsWithItsOwnCodeOrSignal) {
  const auto code = [](const char* worker) {
    Launched run({this_program(), "--worker", worker});
    return run.wait().exit_code;
  };
  EXPECT_EQ(code("fork-fail"), 7);
  EXPECT_EQ(code("fork-stopped"), 4);
  EXPECT_EQ(code("fork-throw-other"), 128 + SIGABRT);
}

TEST(SpawnTest, ForksStartAgain) {
  Launched run({this_program(), "--worker", "fork-restart"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_NE(ended.err.find("; restart 1 of 1\n"), std::string::npos) << ended.err;
  EXPECT_NE(ended.out.find("[rank 1] rank 1 of 2 is local rank 1"), std::string::npos) << ended.out;
}

TEST(SpawnTest, AForkSpawnsNoOthers) {
  Launched run({this_program(), "--worker", "fork-again"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.err.find("expected a process that is no worker"), std::string::npos) << ended.err;
}

TEST(SignalsTest, WhatWasIgnoredBeforeIsIgnoredAfterwards) {
  for (const int signal : {SIGCHLD, SIGPIPE}) {
    struct sigaction ignore {
    }, before{}, after{};
    ignore.sa_handler = SIG_IGN;
    ASSERT_EQ(::sigaction(signal, &ignore, &before), 0);
    { const Signals signals; }
    ASSERT_EQ(::sigaction(signal, &before, &after), 0);
    EXPECT_EQ(after.sa_handler, SIG_IGN) << "signal " << signal;
  }
}

}  // namespace spawn_test
}  // namespace cohort::launch
