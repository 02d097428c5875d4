// SPDX-License-Identifier: Apache-2.0
// What a watch does to its connections when it ends.
#include "cohort/comm/failure_watch.h"

#include <array>
#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cohort/comm/collective_log.h"

#include "tests/support/loopback.h"

namespace cohort::comm {
namespace failure_watch_test {

using cohort::test::Loopback;

// A store that takes its time: `asked` is set when it is first looked at, `go_on` ends the look.
struct SlowStore : c10d::HashStore {
  bool check(const std::vector<std::string>& keys) override {
    if (!std::exchange(was_asked, true)) {
      asked.set_value();
      go_on.get_future().wait();
      was_open_at_the_end = is_open();
    }
    return c10d::HashStore::check(keys);
  }
  bool was_asked = false;
  bool was_open_at_the_end = false;
  std::promise<void> asked, go_on;
  std::function<bool()> is_open;
};

FlightRecord record_of(int rank, const std::vector<MatchedCall>& calls) {
  CollectiveLog log(rank, 3, RankTrace::open(""));
  for (const MatchedCall& call : calls) {
    log.begin({}, call);
    log.end();
  }
  return log.flight_record();
}

MatchedCall call_of(const std::string& group, int64_t number, const std::string& what) {
  return {
      .group = group, .number = number, .what = what, .site = "a.cpp:" + std::to_string(number)};
}

// Numbers of two groups do not compare: the later difference has the lower one here.
TEST(CollectiveLogTest, TheFirstDifferenceIsTheFirstInARanksOwnOrder) {
  const MatchedCall same = call_of("", 1, "all_reduce(sum) of float32[4]");
  const FlightRecords records{
      {0, record_of(0, {same, call_of("", 2, "barrier \"a\""), call_of("pair", 1, "broadcast")})},
      {1, record_of(1, {same, call_of("", 2, "barrier \"b\""), call_of("pair", 1, "gather")})},
      {2, record_of(2, {same, call_of("", 2, "barrier \"a\"")})}};
  EXPECT_EQ(find_mismatch(records).value_or("none"),
            "rank 1 calls barrier \"b\" at a.cpp:2 where rank 0 calls barrier \"a\" at a.cpp:2");
}

TEST(CollectiveLogTest, OfTwoRanksThatPartTheEarlierIsNamed) {
  const auto whole = [](const std::string& third, const std::string& fourth) {
    return std::vector{call_of("", 1, "a"), call_of("", 2, "b"), call_of("", 3, third),
                       call_of("", 4, fourth)};
  };
  const FlightRecords records{{0, record_of(0, whole("c", "d"))},
                              {1, record_of(1, whole("c", "other"))},
                              {2, record_of(2, whole("another", "d"))}};
  EXPECT_EQ(find_mismatch(records).value_or("none"),
            "rank 2 calls another at a.cpp:3 where rank 0 calls c at a.cpp:3");
  // Two groups in different orders: there is no first one.
  const MatchedCall a = call_of("a", 1, "x"), b = call_of("b", 1, "x");
  const FlightRecords crossed{{0, record_of(0, {call_of("a", 1, "y"), call_of("b", 1, "y")})},
                              {1, record_of(1, {b, a})}};
  EXPECT_TRUE(find_mismatch(crossed).has_value());
  EXPECT_EQ(find_mismatch({{0, records.at(0)}, {2, record_of(2, {call_of("", 1, "a")})}}),
            std::nullopt);
}

// The last look may take up to two seconds. A machine that stands still for longer tries again.
TEST(FailureWatchTest, ALookThatIsUnderWayIsNotCutOff) {
  bool was_open = false;
  for (int run = 0; run < 5 && !was_open; ++run) {
    const Loopback loopback;
    auto store = c10::make_intrusive<SlowStore>();
    store->is_open = [&] { return loopback.is_open(); };
    auto watch = std::make_unique<FailureWatch>(
        StoreConnection{store, [&] { ::shutdown(loopback.near.get(), SHUT_RDWR); }}, 0, 2, false,
        FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                          .waiting_ns = [] { return std::nullopt; },
                          .abort = [] {}});
    store->asked.get_future().wait();
    auto end = std::async(std::launch::async, [&] { watch.reset(); });
    EXPECT_EQ(end.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
    store->go_on.set_value();
    end.wait();
    was_open = store->was_open_at_the_end;
    EXPECT_FALSE(loopback.is_open()) << "afterwards nothing is left of them";
  }
  EXPECT_TRUE(was_open);
}

TEST(FailureWatchTest, ASilentStoreIsCutOff) {
  const Loopback loopback;
  auto store = c10::make_intrusive<SlowStore>();
  store->is_open = [&] { return loopback.is_open(); };
  auto watch = std::make_unique<FailureWatch>(
      StoreConnection{store, [&] { ::shutdown(loopback.near.get(), SHUT_RDWR); }}, 0, 2, false,
      FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                        .waiting_ns = [] { return std::nullopt; },
                        .abort = [] {}});
  store->asked.get_future().wait();
  auto end = std::async(std::launch::async, [&] { watch.reset(); });
  for (int i = 0; i < 600 && loopback.is_open(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(loopback.is_open());
  store->go_on.set_value();
  end.wait();
}

// Counts how often it is asked.
struct CountingStore : c10d::HashStore {
  using HashStore::wait;
  bool check(const std::vector<std::string>& keys) override {
    ++num_asked;
    return HashStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    ++num_asked;
    HashStore::wait(keys, limit);
  }
  std::atomic<int> num_asked = 0;
};

TEST(FailureWatchTest, AStoreThatCanWaitIsAskedEveryTwoSeconds) {
  auto store = c10::make_intrusive<CountingStore>();
  {
    const FailureWatch watch(StoreConnection{store, [] {}, [] {}}, 1, 2, false,
                             FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                                               .waiting_ns = [] { return std::nullopt; },
                                               .abort = [] {}});
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    EXPECT_GE(store->num_asked, 1);
    EXPECT_LE(store->num_asked, 2) << "ten times if it polls";
  }
}

// Rank 1 waits in its collective: what it published is what rank 0 would compare.
TEST(FailureWatchTest, AStuckRankPublishesItsRecordOnce) {
  auto store = c10::make_intrusive<CountingStore>();
  const FlightRecord record = record_of(1, {call_of("", 1, "barrier \"a\"\t\xff")});
  const auto start = std::chrono::steady_clock::now();
  {
    const FailureWatch watch(
        StoreConnection{store, [] {}, [] {}}, 1, 2, false,
        FailureWatchCalls{.flight_record = [&] { return record; },
                          .waiting_ns = [&]() -> std::optional<int64_t> {
                            return (std::chrono::steady_clock::now() - start).count();
                          },
                          .abort = [] {}});
    store->wait({"record/1"}, std::chrono::seconds(20));
    EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  }
  EXPECT_EQ(store->add("num_records", 0), 1);
}

}  // namespace failure_watch_test
}  // namespace cohort::comm
