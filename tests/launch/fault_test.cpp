// SPDX-License-Identifier: Apache-2.0
// `cohort run` when workers fail, signals come, or the launcher itself is killed.
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace fault_test {

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Every rank prints "ready" under --tee all before the parent continues.
std::vector<std::string> ready_workers(int num_workers, const std::string& script) {
  return cohort_run_sh({"--nproc-per-node", std::to_string(num_workers), "--tee", "all"}, script);
}

TEST(RunFaultTest, TheFailingRankIsReportedWithItsMessageAndLastLines) {
  Launched run(cohort_run_sh({"--nproc-per-node", "3", "--grace", "0.1"},
                             "if [ $RANK = 1 ]; then"
                             "  i=0; while [ $i -lt 30 ]; do i=$((i+1)); echo line $i >&2; done;"
                             "  echo '{\"message\": \"loss is not finite\"}' > $COHORT_ERROR_FILE;"
                             "  exit 7;"
                             "fi; exec sleep 1000"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_EQ(ended.err.find("cohort run: rank 1 (pid "), 0U) << ended.err;
  EXPECT_TRUE(holds(ended.err, "exited with code 7: loss is not finite\n")) << ended.err;
  EXPECT_FALSE(holds(ended.err, "    line 10\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "    line 11\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "    line 30\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "rank 0, rank 2\n") || holds(ended.err, "rank 2, rank 0\n"));
  ASSERT_EQ(run.temporary().names().size(), 1U);
  EXPECT_TRUE(holds(ended.err, "logs are in " + run.temporary().path() + "/cohort-"));
}

TEST(RunFaultTest, ARankKilledBySignalIsNamedAndTheOthersLeaveByThemselves) {
  // Rank 0 stands for a survivor that notices its lost peer: it waits for the launcher's file.
  Launched run(cohort_run_sh(
      {"--nproc-per-node", "2", "--grace", "60"},
      kExplained + "flag=$COHORT_LOG_DIR/gone;"
                   "if [ $RANK = 1 ]; then echo > $flag; kill -9 $$; fi;"
                   "until [ -e $flag ]; do :; done; echo lost rank 1 >&2; explained 3"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 137);
  EXPECT_TRUE(holds(ended.err, "lost rank 1\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, ") was killed by signal 9 (Killed)\n")) << ended.err;
  EXPECT_FALSE(holds(ended.err, "still running")) << ended.err;
}

TEST(RunFaultTest, ARankThatEndsWellWhileTheOthersNeedItIsNamed) {
  Launched run(
      cohort_run_sh({"--nproc-per-node", "3"},
                    kExplained + "if [ $RANK = 1 ]; then exit 0; fi; sleep 1; explained 3"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_TRUE(holds(ended.err, "ended with exit code 0, perhaps too early: rank 1\n")) << ended.err;
}

// A rank fails every three seconds. Rank 0 would end by itself 15 seconds after the first grace, and
// before a grace that each failure began again.
TEST(RunFaultTest, TheGraceBeginsWithTheFirstFailure) {
  Launched run(
      cohort_run_sh({"--nproc-per-node", "9", "--grace", "5"},
                    "if [ $RANK != 0 ]; then sleep $((3 * RANK - 3)); exit $((RANK + 6)); fi;"
                    "sleep 20; echo rank 0 was not stopped >&2"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7) << ended.err;
  EXPECT_FALSE(holds(ended.err, "rank 0 was not stopped")) << ended.err;
}

TEST(RunFaultTest, TheReportHasNoLineOfARoundBefore) {
  Launched run(cohort_run_sh({"--max-restarts", "1", "--tee", "none"},
                             "echo round $COHORT_RESTART_COUNT failed >&2; exit 7"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_TRUE(holds(ended.err, "last lines of its stderr:\n    round 1 failed\n")) << ended.err;
}

TEST(RunFaultTest, AWorkerThatIgnoresSigtermIsKilled) {
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--grace", "0.1"},
                             "trap '' TERM; flag=$COHORT_LOG_DIR/ready;"
                             "if [ $RANK = 0 ]; then echo > $flag; exec sleep 1000; fi;"
                             "until [ -e $flag ]; do :; done; exit 1"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(holds(ended.err, "after the grace period: rank 0\n")) << ended.err;
}

TEST(RunFaultTest, SignalsReachEveryWorkerAndACheckpointMeansFour) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    Launched run(ready_workers(2, kExplained + "trap 'explained 4' INT TERM HUP QUIT; echo ready; "
                                               "while :; do sleep 1000 & wait; done"));
    run.read_lines(2);
    run.send(signal);
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 4) << signal;
    EXPECT_EQ(ended.err, "");
    EXPECT_TRUE(run.temporary().names().empty());
  }
}

TEST(RunFaultTest, WorkersThatDieOfThePassedSignalGiveItsCode) {
  Launched run(ready_workers(2, "echo ready; exec sleep 1000"));
  run.read_lines(2);
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 143);
  EXPECT_EQ(ended.err.find("cohort run: stopped by signal 15 (Terminated)\n"), 0U) << ended.err;
}

TEST(RunFaultTest, ASecondInterruptKills) {
  Launched run(ready_workers(2,
                             "trap 'echo noted' INT; echo ready; "
                             "while :; do sleep 1000 & wait; done"));
  run.read_lines(2);
  run.send(SIGINT);
  run.read_lines(4);
  const auto start = std::chrono::steady_clock::now();
  run.send(SIGINT);
  EXPECT_EQ(run.wait().exit_code, 130);
  // One alone kills 25 seconds after the grace of 5.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(RunFaultTest, GrandchildrenEndWithTheJob) {
  // timeout puts itself and what it starts into a process group of their own.
  for (const std::string starter : {"", "timeout 1000 "}) {
    const TemporaryFolder folder;
    const std::string flag = folder.path() + "/leave";
    Launched run(ready_workers(1, starter + "sh -c 'echo $$; exec sleep 1000' & until [ -e " +
                                      flag + " ]; do sleep 0.02; done"));
    std::istringstream words(run.read_lines(1));
    std::string skipped;
    pid_t grandchild = 0;
    words >> skipped >> skipped >> grandchild;
    const Watched watched(grandchild);
    std::ofstream(flag).flush();
    EXPECT_EQ(run.wait().exit_code, 0);
    EXPECT_TRUE(watched.wait_for_end()) << starter;
  }
}

// The worker waits for the file that the other group writes, not for timeout: if SIGTERM arrives
// between timeout's fork() and the moment it stores the child's pid, it exits and passes nothing on.
TEST(RunFaultTest, SignalsReachAllProcessGroupsOfAWorker) {
  Launched run(ready_workers(
      1, kExplained +
             "trap : TERM; noted=$COHORT_LOG_DIR/noted; export noted;"
             "timeout 1000 sh -c 'trap \"echo noted; echo > $noted; exit\" TERM; echo ready;"
             "                    while :; do sleep 0.02; done' & "
             "until [ -e $noted ]; do sleep 0.02; done; explained 4"));
  run.read_lines(1);
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 4);
  EXPECT_TRUE(holds(ended.out, "[rank 0] noted\n")) << ended.out;
}

TEST(RunFaultTest, AKilledLauncherLeavesNoProcess) {
  Launched run(ready_workers(2, "timeout 1000 sh -c \"echo \\$\\$ $$; exec sleep 1000\" & wait"));
  std::istringstream words(run.read_lines(2));
  std::vector<Watched> watched;
  for (int i = 0; i < 2; ++i) {
    std::string skipped;
    pid_t grandchild = 0, worker = 0;
    words >> skipped >> skipped >> grandchild >> worker;
    watched.emplace_back(grandchild);
    watched.emplace_back(worker);
  }
  // The launcher's children are the workers and the reaper.
  const std::string launcher = std::to_string(run.pid());
  std::istringstream children(read_file("/proc/" + launcher + "/task/" + launcher + "/children"));
  int num_children = 0;
  for (pid_t child = 0; children >> child; ++num_children) watched.emplace_back(child);
  EXPECT_EQ(num_children, 3);
  run.send(SIGKILL);
  for (const Watched& process : watched) EXPECT_TRUE(process.wait_for_end());
}

TEST(RunFaultTest, AStalledReaderDoesNotHoldUpSignals) {
  const TemporaryFolder logs;
  Launched run(
      cohort_run_sh({"--log-dir", logs.path()}, "echo $$ > $COHORT_LOG_DIR/pid; exec yes"));
  const Watched worker(std::stoi(wait_for_file(logs.path() + "/pid")));
  run.send(SIGTERM);  // Nobody reads the launcher's stdout.
  EXPECT_TRUE(worker.wait_for_end());
  EXPECT_EQ(run.wait().exit_code, 143);
}

// The folder of a run that was given none.
std::string fresh_logs(const Launched& run) {
  for (const std::string& name : run.temporary().names()) {
    if (name.starts_with("cohort-")) return run.temporary().path() + "/" + name;
  }
  return "";
}

template <typename Holds>
void wait_until(Holds condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// A log file that takes nothing, as on a disk or a server that hangs.
TEST(RunFaultTest, ALogThatTakesNothingDoesNotHoldUpSignals) {
  const TemporaryFolder logs;
  const std::string fifo = logs.path() + "/rank0.stdout.log";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const Fd reader(::open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader);
  Launched run(cohort_run_sh({"--tee", "none", "--log-dir", logs.path()},
                             "head -c 50000000 /dev/zero; touch " + logs.path() + "/written"));
  pollfd wait{reader.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&wait, 1, 60'000), 1);
  ::sleep(1);
  const auto begin = std::chrono::steady_clock::now();
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 143) << ended.err;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(25));
  EXPECT_TRUE(holds(ended.err, " are incomplete: their disk accepts no writes\n")) << ended.err;
  EXPECT_NE(::access((logs.path() + "/written").c_str(), F_OK), 0) << "50 MB were kept in memory";
}

// A traced process is not its parent's to reap: for the launcher it stays, as in state D.
TEST(RunFaultTest, AWorkerThatSigkillDoesNotEndIsLeftBehind) {
  Launched run(cohort_run_sh({}, "echo $$; exec sleep 1000"));
  const pid_t worker = std::stoi(run.read_lines(1));
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, worker, nullptr, nullptr), 0) << std::strerror(errno);
  run.send(SIGINT);
  run.send(SIGINT);
  run.wait_for_err("cohort run: ");
  const Ended ended = run.wait();
  EXPECT_TRUE(holds(ended.err, "rank 0 (pid " + std::to_string(worker) +
                                   ") does not end after SIGKILL and is left behind"))
      << ended.err;
  EXPECT_GE(ended.exit_code, 128) << ended.err;
  int status = 0;
  EXPECT_EQ(::waitpid(worker, &status, __WALL), worker);
}

TEST(RunFaultTest, AReaderThatLeavesAtTheEndIsForgotten) {
  // More than the pipe to the reader holds, less than the launcher takes before it pauses.
  Launched run(cohort_run_sh({}, "yes | head -c 140000"));
  wait_until([&] { return read_file(fresh_logs(run) + "/rank0.stdout.log").size() == 140000; });
  // The launcher has blocked signals while workers may run; then it waits for the reader alone.
  wait_until([&] {
    const std::string status = read_file("/proc/" + std::to_string(run.pid()) + "/status");
    return holds(status, "SigBlk:\t0000000000000000\n");
  });
  run.close_out();
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(run.temporary().names().empty());
}

TEST(RunFaultTest, ASignalAfterTheLastWorkerChangesNothing) {
  // A daemon holds the worker's streams, so the launcher waits a second for their last bytes.
  Launched run(
      cohort_run_sh({},
                    "flag=$COHORT_LOG_DIR/there; setsid sh -c 'echo > $0; exec sleep 3' $flag &"
                    "until [ -e $flag ]; do :; done; echo $$"));
  const pid_t worker = std::stoi(run.read_lines(1));
  wait_until([&] { return ::kill(worker, 0) != 0 && errno == ESRCH; });
  run.send(SIGTERM);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(run.temporary().names().empty());
}

}  // namespace fault_test
}  // namespace cohort::launch
