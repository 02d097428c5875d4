// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/side_task.h"

#include <atomic>
#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <thread>

namespace cohort::ps {
namespace side_task_test {

TEST(SideTaskTest, ATaskRunsOnceForEachCallWhicheverThreadRunsIt) {
  int runs = 0;  // Without a lock: the thread sanitizer sees whether finish() orders the threads.
  SideTask task("side-task", [&] { ++runs; });
  for (int i = 1; i <= 2000; ++i) {
    task.begin();
    if (i % 2 == 0) std::this_thread::yield();
    task.finish();
    ASSERT_EQ(runs, i);
  }
}

TEST(SideTaskTest, ATaskRunsBesideItsCaller) {
  std::promise<std::thread::id> runs;
  std::promise<void> may_end;
  std::atomic<bool> has_ended = false;
  {
    SideTask task("side-task", [&] {
      runs.set_value(std::this_thread::get_id());
      may_end.get_future().wait();
      has_ended = true;
    });
    task.begin();
    auto thread = runs.get_future();
    ASSERT_EQ(thread.wait_for(std::chrono::seconds(60)), std::future_status::ready);
    EXPECT_NE(thread.get(), std::this_thread::get_id());
    EXPECT_FALSE(has_ended);
    may_end.set_value();
    task.finish();
    EXPECT_TRUE(has_ended);
  }
}

}  // namespace side_task_test
}  // namespace cohort::ps
