// SPDX-License-Identifier: Apache-2.0
// `cohort run --max-restarts`, and what is reported about a failed rank.
#include <gtest/gtest.h>
#include <signal.h>
#include <sstream>

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace restart_test {

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RestartTest, AllWorkersRestartAndResumeFromTheirCheckpoint) {
  const TemporaryFolder folder;
  // A training program in small: counts steps in a file; rank 1 dies once, at step 3.
  Launched run(cohort_run_sh(
      {"--nproc-per-node", "2", "--max-restarts", "2", "--tee", "all", "--grace", "0.1"},
      "cd " + folder.path() +
          "; step=$(cat step$RANK 2>/dev/null || echo 0);"
          "echo begins at $step restart $COHORT_RESTART_COUNT port $MASTER_PORT;"
          "while [ $step -lt 5 ]; do step=$((step+1)); echo $step > step$RANK;"
          "  if [ $RANK$step$TORCHELASTIC_RESTART_COUNT = 130 ]; then"
          "    until [ \"$(cat step0 2>/dev/null)\" = 4 ]; do :; done; kill -9 $$; fi;"
          "  if [ $RANK$step$TORCHELASTIC_RESTART_COUNT = 040 ]; then exec sleep 1000; fi;"
          "done; echo ends at $step"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err.find("cohort run: rank 1 (pid "), 0U) << ended.err;
  EXPECT_TRUE(holds(ended.err, ") was killed by signal 9 (Killed); restart 1 of 2\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "\ncohort run: logs are in /")) << "of the first round";
  EXPECT_EQ(sorted_lines(ended.err).size(), 2U) << ended.err;
  for (const char* part : {"[rank 0] begins at 0 restart 0 ", "[rank 1] begins at 0 restart 0 ",
                           "[rank 0] begins at 4 restart 1 ", "[rank 1] begins at 3 restart 1 ",
                           "[rank 0] ends at 5\n", "[rank 1] ends at 5\n"}) {
    EXPECT_TRUE(holds(ended.out, part)) << part << ended.out;
  }
  // The store's port stays.
  std::vector<std::string> ports;
  std::istringstream words(ended.out);
  for (std::string word; words >> word;) {
    if (word == "port" && words >> word) ports.push_back(word);
  }
  ASSERT_EQ(ports.size(), 4U);
  for (const std::string& port : ports) EXPECT_EQ(port, ports.front());
}

TEST(RestartTest, EachRoundHasAFreshListeningSocket) {
  const TemporaryFolder folder;
  const std::string mark = folder.path() + "/mark";
  Launched run(cohort_run_sh({"--max-restarts", "1"}, "if [ ! -e " + mark + " ]; then echo > " +
                                                          mark + "; exit 1; fi; exec " +
                                                          this_program() + " --worker store"));
  EXPECT_EQ(run.wait().out, "rank 0 listens on MASTER_PORT, 0 others\n");
}

TEST(RestartTest, WhenRestartsAreUsedUpTheFailureIsTheJobs) {
  Launched run(cohort_run_sh({"--max-restarts", "2"}, "echo round $COHORT_RESTART_COUNT; exit 9"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 9);
  EXPECT_EQ(ended.out, "round 0\nround 1\nround 2\n");
  EXPECT_TRUE(holds(ended.err, "exited with code 9; restart 2 of 2\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "exited with code 9\ncohort run: logs are in")) << ended.err;
}

TEST(RestartTest, AGoodEndABadFlagAndASignalAreNoReasonToRestart) {
  for (const std::string code : {"0", "2", "4"}) {
    Launched run(
        cohort_run_sh({"--max-restarts", "3"}, kExplained + "echo started; explained " + code));
    const Ended ended = run.wait();
    EXPECT_EQ(std::to_string(ended.exit_code), code);
    EXPECT_EQ(ended.out, "started\n");
  }
  Launched run(cohort_run_sh({"--max-restarts", "3"}, "echo started; exec sleep 1000"));
  run.read_lines(1);
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 143);
  EXPECT_EQ(ended.out, "started\n");
}

// pytest's, wget's and bash's own.
TEST(RestartTest, CodesOfOtherProgramsAreReasonsToRestart) {
  for (const std::string code : {"2", "3", "4"}) {
    Launched run(cohort_run_sh({"--max-restarts", "1"}, "echo started; exit " + code));
    const Ended ended = run.wait();
    EXPECT_EQ(std::to_string(ended.exit_code), code);
    EXPECT_EQ(ended.out, "started\nstarted\n");
    EXPECT_TRUE(holds(ended.err, "exited with code " + code + "\ncohort run: logs are in"))
        << ended.err;
  }
}

TEST(RestartTest, AKilledLauncherLeavesNoProcessOfALaterRound) {
  Launched run(cohort_run_sh({"--max-restarts", "1"},
                             "if [ $COHORT_RESTART_COUNT = 0 ]; then exit 1; fi;"
                             "sleep 1000 & echo $!; wait"));
  const Watched grandchild(std::stoi(run.read_lines(1)));
  run.send(SIGKILL);
  EXPECT_TRUE(grandchild.wait_for_end());
}

TEST(RestartTest, LogsOfAllRoundsStay) {
  const TemporaryFolder logs;
  Launched run(cohort_run_sh({"--max-restarts", "1", "--log-dir", logs.path(), "--tee", "none"},
                             "echo round $COHORT_RESTART_COUNT; exit 1"));
  run.wait();
  EXPECT_EQ(read_file(logs.path() + "/rank0.stdout.log"), "round 0\nround 1\n");
}

TEST(RestartTest, AnUnforeseenErrorShowsWhereItWasRaised) {
  Launched run(cohort_run({"--tee", "none"}, {this_program(), "--worker", "throw"}));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(holds(ended.err, "exited with code 1: the sky fell\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "cohort run: raised at:\n    ")) << ended.err;
}

}  // namespace restart_test
}  // namespace cohort::launch
