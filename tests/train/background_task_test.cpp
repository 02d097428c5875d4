// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/background_task.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <sched.h>
#include <stdexcept>
#include <sys/resource.h>
#include <unistd.h>

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

}  // namespace background_task_test
}  // namespace cohort::train
