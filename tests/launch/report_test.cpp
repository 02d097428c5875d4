// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/report.h"

#include <fstream>
#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/launch/environment.h"

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace report_test {

// Of a program that explained its exit code.
Outcome exited(int rank, int code, int passed_signal = 0, bool stopped = false) {
  return {.rank = rank,
          .pid = 100 + rank,
          .status = {code, 0},
          .passed_signal = passed_signal,
          .stopped = stopped,
          .note = "",
          .explained = true};
}

Outcome killed(int rank, int signal, int passed_signal = 0, bool stopped = false) {
  return {rank, 100 + rank, {128 + signal, signal}, passed_signal, stopped};
}

// Exit code and the rank of the root cause, -1 if none.
std::pair<int, int> concluded(const std::vector<Outcome>& outcomes) {
  const JobOutcome job = job_outcome(outcomes);
  return {job.exit_code, job.root_cause ? job.root_cause->rank : -1};
}

TEST(JobOutcomeTest, SuccessAndStopsAreNoFailures) {
  EXPECT_EQ(concluded({exited(0, 0), exited(1, 0)}), std::pair(0, -1));
  EXPECT_EQ(concluded({exited(0, 4), exited(1, 0)}), std::pair(4, -1));
  EXPECT_EQ(concluded({exited(0, 4, SIGTERM), exited(1, 4, SIGTERM)}), std::pair(4, -1));
}

TEST(JobOutcomeTest, ALostPeerIsAConsequence) {
  EXPECT_EQ(concluded({exited(0, 3), killed(2, SIGKILL), exited(1, 1)}), std::pair(137, 2));
  EXPECT_EQ(concluded({exited(1, 3), exited(0, 3)}), std::pair(3, 1));
}

TEST(JobOutcomeTest, CodesOfOtherProgramsMeanNothingSpecial) {
  for (const int code : {2, 3, 4, 5}) {
    Outcome foreign = exited(1, code);
    foreign.explained = false;
    EXPECT_EQ(concluded({exited(0, 3), foreign}), std::pair(code, 1))
        << "a failure, no consequence";
    EXPECT_EQ(job_outcome(std::vector{foreign}).meaning, kExitFailure);
  }
  EXPECT_EQ(job_outcome(std::vector{exited(0, 2)}).meaning, kExitUsage);
}

TEST(JobOutcomeTest, AnErrorFileExplainsItsOwnCodeOnly) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/error.json";
  EXPECT_FALSE(explains(path, 3)) << "no file";
  std::ofstream(path) << R"({"exit_code": 3})";
  EXPECT_TRUE(explains(path, 3));
  EXPECT_FALSE(explains(path, 2));
  std::ofstream(path) << "[3]";
  EXPECT_FALSE(explains(path, 3));
}

TEST(JobOutcomeTest, AStoppedRankIsNotTheRootCause) {
  EXPECT_EQ(concluded({exited(1, 3), killed(0, SIGTERM, 0, true)}), std::pair(3, 1));
}

TEST(JobOutcomeTest, APassedSignalDecidesUnlessARankFailedBefore) {
  EXPECT_EQ(concluded({exited(0, 3, SIGTERM), killed(1, SIGTERM, SIGTERM)}), std::pair(143, -1));
  EXPECT_EQ(concluded({exited(0, 130, SIGINT), exited(1, 4, SIGINT)}), std::pair(130, -1));
  EXPECT_EQ(concluded({killed(0, SIGKILL, SIGINT, true)}), std::pair(130, -1));
  EXPECT_EQ(concluded({exited(1, 7), killed(0, SIGINT, SIGINT)}), std::pair(7, 1));
  EXPECT_EQ(concluded({exited(1, 7, SIGINT), exited(0, 4, SIGINT)}), std::pair(7, 1));
}

TEST(DescribeTest, NamesSignalCodeAndMessage) {
  const TemporaryFolder folder;
  EXPECT_EQ(describe(killed(1, SIGKILL), folder.path()),
            "rank 1 (pid 101) was killed by signal 9 (Killed)");
  EXPECT_EQ(describe(exited(2, 1), folder.path()), "rank 2 (pid 102) exited with code 1");
  std::ofstream(error_file(folder.path(), 2)) << R"({"message": "loss is not finite"})";
  EXPECT_EQ(describe(exited(2, 1), folder.path()),
            "rank 2 (pid 102) exited with code 1: loss is not finite");
  // A message of any length fits into a line to the rendezvous server; no character is cut in two.
  std::string umlauts;
  while (umlauts.size() < 100'000) umlauts += "\u00fc";
  std::ofstream(error_file(folder.path(), 2)) << R"({"message": "x)" << umlauts << R"("})";
  EXPECT_EQ(describe(exited(2, 1), folder.path()),
            "rank 2 (pid 102) exited with code 1: x" + umlauts.substr(0, 4094) + " ...");
  std::ofstream(error_file(folder.path(), 2)) << R"({"mess)";
  EXPECT_EQ(describe(exited(2, 1), folder.path()), "rank 2 (pid 102) exited with code 1");
}

TEST(IndentedTailTest, KeepsTheLastLinesAndTheLastStateOfAProgressBar) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log";
  EXPECT_EQ(indented_tail(path, 2), "");
  std::ofstream(path) << "one\ntwo\r\n 10 %\r 20 %\nend";
  EXPECT_EQ(indented_tail(path, 3), "    two\n     20 %\n    end\n");
  EXPECT_EQ(indented_tail(path, 3, 4), "    two\n     20 %\n    end\n");
  EXPECT_EQ(indented_tail(path, 4, 9), "     20 %\n    end\n") << "begins after the line two";
  EXPECT_EQ(indented_tail(path, 1, 1000), "    end\n") << "a file that is shorter than was written";
}

}  // namespace report_test
}  // namespace cohort::launch
