// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/background_task.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <gtest/gtest.h>
#include <mutex>
#include <sched.h>
#include <stdexcept>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/checksum.h"

namespace cohort::train {
namespace background_task_test {

TEST(BackgroundTaskTest, GivesWayToTraining) {
  int nice = 0;
  int policy = -1;
  BackgroundTask task("test");
  task.start([&] {
    nice = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    policy = ::sched_getscheduler(0);
  });
  task.wait();
  EXPECT_EQ(nice, std::min(::getpriority(PRIO_PROCESS, 0) + 10, 19));
  EXPECT_EQ(policy, SCHED_BATCH);
}

TEST(BackgroundTaskTest, TheFirstErrorIsToldOnce) {
  BackgroundTask task("test");
  task.start([] { throw std::runtime_error("first"); });
  task.start([] { throw std::runtime_error("second"); });
  task.wait_idle();
  EXPECT_FALSE(task.busy());
  try {
    task.wait();
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  task.wait();
}

// A program may exit while a save runs, or keep its handle in a static variable.
[[noreturn]] void exit_while_a_task_runs() {
  auto* const task = new BackgroundTask("test");
  task->start([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    Sha256 checksum;
    checksum.update("a save");
    std::fprintf(stderr, "wrote %zu digits", checksum.hex().size());
  });
  std::exit(0);
}

TEST(BackgroundTaskTest, ExitWaitsForWhatRuns) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_while_a_task_runs(), testing::ExitedWithCode(0), "wrote 64 digits");
}

// It waits for its own task, and not for the parent's, whose thread it does not have.
TEST(BackgroundTaskTest, SoDoesAForkedProcessForItsOwn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fork_and_wait = [] {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    BackgroundTask of_parent("parent");
    of_parent.start([&] { const std::scoped_lock until_the_child_has_ended(mutex); });
    const pid_t child = ::fork();
    if (child == 0) exit_while_a_task_runs();
    int status = -1;
    ::waitpid(child, &status, 0);
    lock.unlock();
    of_parent.wait();
    std::_Exit(WIFEXITED(status) ? WEXITSTATUS(status) : 100);
  };
  EXPECT_EXIT(fork_and_wait(), testing::ExitedWithCode(0), "wrote 64 digits");
}

}  // namespace background_task_test
}  // namespace cohort::train
