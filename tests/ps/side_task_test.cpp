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

TEST(SideTaskTest, ItsEndWaitsForATaskThatRuns) {
  std::promise<void> runs;
  std::atomic<bool> has_ended = false;
  {
    SideTask task("side-task", [&] {
      runs.set_value();
      // An end that did not wait would be over first.
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      has_ended = true;
    });
    task.begin();
    ASSERT_EQ(runs.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  }
  EXPECT_TRUE(has_ended);
}

TEST(SideTaskTest, ATaskThatNobodyFinishesRunsWholeOrNotAtAll) {
  for (int i = 0; i < 200; ++i) {
    int begun = 0, ended = 0;  // Without a lock, as above.
    {
      SideTask task("side-task", [&] {
        ++begun;
        std::this_thread::yield();
        ++ended;
      });
      task.begin();
      if (i % 2 == 0) std::this_thread::yield();
    }
    ASSERT_EQ(begun, ended);
    ASSERT_LE(ended, 1);
  }
}

}  // namespace side_task_test
}  // namespace cohort::ps
