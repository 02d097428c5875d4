// SPDX-License-Identifier: Apache-2.0
// The thread that calls at given times.
#include "cohort/ps/client/timer_thread.h"

#include <atomic>
#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <vector>

namespace cohort::ps {
namespace timer_thread_test {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

bool is_set(std::promise<void>& promise) {
  return promise.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
}

TEST(TimerThreadTest, CallsComeInTheOrderOfTheirTimes) {
  std::vector<int> order;
  std::promise<void> done;
  TimerThread timer;
  const auto now = steady_clock::now();
  // Among what it already waits for: later, earlier, and of one time.
  timer.call_at(nullptr, now + milliseconds(60), [&] { done.set_value(); });
  timer.call_at(nullptr, now + milliseconds(40), [&] { order.push_back(2); });
  timer.call_at(nullptr, now + milliseconds(20), [&] {
    EXPECT_GE(steady_clock::now(), now + milliseconds(20));
    order.push_back(1);
  });
  timer.call_at(nullptr, now + milliseconds(40), [&] { order.push_back(3); });
  timer.call_at(nullptr, now - hours(1), [&] { order.push_back(0); });
  ASSERT_TRUE(is_set(done));
  EXPECT_EQ(order, (std::vector{0, 1, 2, 3}));
}

TEST(TimerThreadTest, ACallMayMakeMoreAndCancelItsOwn) {
  std::promise<void> done;
  int runs = 0, cancelled = 0;
  const int own = 0, other = 0;
  TimerThread timer;
  const auto now = steady_clock::now();
  timer.call_at(&own, now + milliseconds(10), [&] {
    ++runs;
    timer.cancel(&own);  // Does not wait for itself.
    timer.call_at(&own, now, [&] { ++runs; });
  });
  timer.call_at(&own, now + milliseconds(20), [&] { ++cancelled; });
  timer.call_at(&other, now + milliseconds(30), [&] { done.set_value(); });
  ASSERT_TRUE(is_set(done)) << "another's stays";
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(cancelled, 0);
}

TEST(TimerThreadTest, NoCallRunsOnceCancelHasReturned) {
  const int owner = 0;
  TimerThread timer;
  for (int round = 0; round < 200; ++round) {
    std::promise<void> began;
    std::atomic<bool> runs = false;
    timer.call_at(&owner, steady_clock::now(), [&] {
      runs = true;
      began.set_value();
      std::this_thread::yield();
      runs = false;
    });
    // What is yet to come holds what is gone below, if it were called.
    auto held = std::make_unique<int>(round);
    timer.call_at(&owner, steady_clock::now(), [&held] { ++*held; });
    ASSERT_TRUE(is_set(began));
    timer.cancel(&owner);
    EXPECT_FALSE(runs);
    held.reset();
  }
}

TEST(TimerThreadTest, ItsEndWaitsForTheCallThatRunsAndDropsTheOthers) {
  std::promise<void> began;
  std::atomic<int> runs = 0;
  auto held = std::make_shared<int>(0);
  std::optional<TimerThread> timer(std::in_place);
  timer->call_at(nullptr, steady_clock::now(), [&] {
    began.set_value();
    std::this_thread::yield();
    ++runs;
  });
  timer->call_at(nullptr, steady_clock::now() + hours(1), [&runs, held] { runs += 10; });
  ASSERT_TRUE(is_set(began));
  timer.reset();
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(held.use_count(), 1) << "what the others held is gone";
}

}  // namespace timer_thread_test
}  // namespace cohort::ps
