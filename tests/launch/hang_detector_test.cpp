// SPDX-License-Identifier: Apache-2.0
// `cohort run` and ranks that hang.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "cohort/base/trace_page.h"
#include "cohort/launch/signals.h"

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace hang_detector_test {

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::string> tracing(std::vector<std::string> flags, const std::string& what) {
  flags.insert(flags.end(), {"--nproc-per-node", "2"});
  return cohort_run(flags, {this_program(), "--worker", "trace-" + what});
}

TEST(HangDetectorTest, AStallNamesTheMissingRanksAndTheirStacks) {
  Launched run(tracing({"--stall-timeout", "2"}, "running"));
  const std::string text = run.wait_for_err("rank 1 is at\n");
  EXPECT_EQ(text.find("cohort run: stalled: rank 0 in all_reduce(sum) #5, missing: rank 1\n"), 0U)
      << text;
  EXPECT_TRUE(holds(text, "all_reduce(sum)")) << text;
  EXPECT_TRUE(holds(text, "float32[8]")) << text;
  EXPECT_TRUE(holds(text, "train.cpp:12")) << text;
  EXPECT_TRUE(holds(run.wait_for_err("pause"), "pause")) << text;  // Where rank 1 is.
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 143);  // The job continued, and a stall is reported once.
  EXPECT_EQ(ended.err.find("stalled:"), ended.err.rfind("stalled:")) << ended.err;
}

// Wherever it stands: outside of collectives, in that of the others, or still in an earlier one.
TEST(HangDetectorTest, AStoppedRankIsNamedAndEndsTheJob) {
  for (const std::string what : {"stopped", "came-stopped", "behind-stopped"}) {
    Launched run(tracing({"--stall-timeout", "2", "--grace", "0.1"}, what));
    run.wait_for_err(") was stopped (state T) for ");
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 137) << what;
    EXPECT_EQ(
        ended.err.find("cohort run: stalled: rank 0 in all_reduce(sum) #5, missing: rank 1\n"), 0U)
        << ended.err;
    EXPECT_TRUE(holds(ended.err, "stopped (T)")) << ended.err;
    EXPECT_TRUE(holds(ended.err, "rank 1 is stopped (state T) and cannot report its stack\n"));
    EXPECT_TRUE(holds(ended.err, "cohort run: rank 1 (pid ")) << ended.err;
    EXPECT_TRUE(holds(ended.err, ") was stopped (state T) for ")) << ended.err;
    EXPECT_TRUE(holds(ended.err, "while others waited in all_reduce(sum) #5\n")) << ended.err;
  }
}

// No rank waits where all were stopped.
TEST(HangDetectorTest, RanksHeldByADebuggerOrStoppedWithAllOthersAreNotKilled) {
  for (const auto& [what, state] :
       {std::pair("all-stopped", "stopped (T)"), std::pair("traced", "traced (t)")}) {
    Launched run(tracing({"--stall-timeout", "1", "--watch", "0.2", "--grace", "0.1"}, what));
    const std::string text = run.wait_for_err(state, 20);  // The job continues.
    EXPECT_EQ(holds(text, "stalled: "), what == std::string("traced")) << text;
    run.send(SIGTERM);
    run.send(SIGINT);
    const Ended ended = run.wait();
    EXPECT_NE(ended.exit_code, 137) << what;
    EXPECT_FALSE(holds(ended.err, ") was stopped")) << ended.err;
  }
}

// It need not be a member of the group.
TEST(HangDetectorTest, ARankOutsideOfASubGroupsCollectiveIsNotCalledMissingNorKilled) {
  Launched run(
      tracing({"--stall-timeout", "0.5", "--watch", "0.2", "--grace", "0.1"}, "subgroup-stopped"));
  const std::string stalled =
      "cohort run: stalled: rank 0 in all_reduce(sum) #5 of group \"pair\", not in it: rank 1 "
      "(missing if a member of the group)\n";
  run.wait_for_err(stalled);
  run.wait_for_err("state of the ranks\n", 8);  // The job continues.
  run.send(SIGTERM);
  run.send(SIGINT);
  const Ended ended = run.wait();
  EXPECT_NE(ended.exit_code, 137);
  EXPECT_FALSE(holds(ended.err, ", missing: ")) << ended.err;
  EXPECT_FALSE(holds(ended.err, ") was stopped")) << ended.err;
}

TEST(HangDetectorTest, AScriptAroundTheProgramHidesNothing) {
  const std::string program = this_program() + " --worker trace-stopped";
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--stall-timeout", "2", "--grace", "0.1"},
                             program + "; exit 9"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 137);
  EXPECT_TRUE(holds(ended.err, "rank 1 is stopped (state T)")) << ended.err;
}

TEST(HangDetectorTest, TheTableComesRegularlyAndOnASignal) {
  Launched regular(tracing({"--watch", "0.2", "--stall-timeout", "0"}, "running"));
  const std::string header = "cohort run: state of the ranks\n";
  const std::string first = regular.wait_for_err(header);
  EXPECT_EQ(first.find(header), 0U) << first;
  regular.wait_for_err(header, 2);
  regular.send(SIGTERM);
  regular.wait();

  const TemporaryFolder logs;
  Launched asked(tracing({"--log-dir", logs.path(), "--stall-timeout", "0"}, "running"));
  const auto waits = [&] {
    const auto record = TracePage::read(logs.path() + "/rank0.trace");
    return record && record->state == TraceState::kWaiting;
  };
  for (int i = 0; i < 6000 && !waits(); ++i) ::usleep(10000);
  asked.send(table_signal());
  const std::string text = asked.wait_for_err("state of the ranks\n");
  EXPECT_TRUE(holds(text, "waiting")) << text;
  asked.send(SIGTERM);
  EXPECT_EQ(asked.wait().exit_code, 143);
}

TEST(HangDetectorTest, ATimeBelowAMillisecondIsNotNever) {
  Launched run(cohort_run_sh({"--watch", "0.0001"}, "sleep 0.2"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_TRUE(holds(ended.err, "cohort run: state of the ranks\n")) << ended.err;
}

TEST(HangDetectorTest, ProgramsWithoutATraceAreLeftAlone) {
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--stall-timeout", "0.1"}, "sleep 0.5"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.err, "");
}

}  // namespace hang_detector_test
}  // namespace cohort::launch
