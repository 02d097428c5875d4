// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/prefetch.h"

#include <atomic>
#include <gtest/gtest.h>
#include <latch>
#include <memory>
#include <stdexcept>

namespace cohort::data {
namespace prefetch_test {

TEST(PrefetcherTest, DeliversItemsInOrderThenNothing) {
  Prefetcher<std::unique_ptr<int>> items(
      [i = 0]() mutable -> std::optional<std::unique_ptr<int>> {
        if (i == 100) return std::nullopt;
        return std::make_unique<int>(i++);
      },
      3);
  for (int i = 0; i < 100; ++i) {
    auto item = items.next();
    ASSERT_TRUE(item);
    EXPECT_EQ(**item, i);
  }
  EXPECT_FALSE(items.next());
  EXPECT_FALSE(items.next());
}

TEST(PrefetcherTest, WorksAheadButNoFurtherThanItsDepth) {
  std::atomic<int> produced = 0;
  Prefetcher<int> items([&]() -> std::optional<int> { return produced++; }, 2);
  while (produced < 2) std::this_thread::yield();  // Nobody asked yet.
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(items.next(), i);
    // i + 1 were taken, two may wait.
    EXPECT_LE(produced, i + 1 + 2);
  }
}

TEST(PrefetcherTest, RethrowsWhatTheProducerThrewAfterTheItemsBeforeIt) {
  Prefetcher<int> items([i = 0]() mutable -> std::optional<int> {
    if (i == 2) throw std::domain_error("line 3");
    return i++;
  });
  EXPECT_EQ(items.next(), 0);
  EXPECT_EQ(items.next(), 1);
  EXPECT_THROW(items.next(), std::domain_error);
  EXPECT_THROW(items.next(), std::domain_error);
}

TEST(PrefetcherTest, EndsWhileTheProducerWaitsForRoom) {
  std::atomic<int> produced = 0;
  {
    Prefetcher<int> items([&]() -> std::optional<int> { return produced++; }, 4);
    while (produced < 4) std::this_thread::yield();
  }
  EXPECT_EQ(produced, 4);
}

TEST(PrefetcherTest, TheDestructorWaitsForTheRunningCallOnly) {
  std::atomic<int> calls = 0;
  std::latch running(1);
  std::latch release(1);
  std::jthread helper;
  {
    Prefetcher<int> items(
        [&]() -> std::optional<int> {
          if (++calls == 1) {
            running.count_down();
            release.wait();
          }
          return 0;
        },
        1'000'000'000);
    running.wait();
    helper = std::jthread([&] { release.count_down(); });
  }
  // It may have begun another call before the destructor asked it to stop, but it did stop.
  const int at_end = calls;
  helper.join();
  EXPECT_EQ(calls, at_end);
}

}  // namespace prefetch_test
}  // namespace cohort::data
