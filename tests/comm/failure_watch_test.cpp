// SPDX-License-Identifier: Apache-2.0
// What a watch does to its connections when it ends.
#include "cohort/comm/failure_watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cohort/comm/collective_log.h"
#include "cohort/comm/device_calls.h"

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

// Of these ranks the log has kept later calls alone.
TEST(CollectiveLogTest, WhatADeviceWaitsInIsComparedHoweverManyCallsFollow) {
  const auto record = [](int rank, const std::string& what) {
    CollectiveLog log(rank, 2, RankTrace::open(""));
    const MatchedCall call = call_of("", log.add(call_of("", 0, what)), what);
    for (int i = 0; i < 80; ++i) log.add(call_of("", 0, "all_reduce"));
    FlightRecord result = log.flight_record();
    const auto is_it = [&](const MatchedCall& each) { return each.number == call.number; };
    EXPECT_TRUE(std::ranges::none_of(result.matched, is_it));
    result.device_waits = {{.call = call, .name = "world", .ranks = {0, 1}, .ms = 9000}};
    return result;
  };
  const FlightRecord mine = record(0, "all_reduce");
  EXPECT_EQ(find_mismatch({{0, mine}, {1, record(1, "broadcast")}}).value_or("none"),
            "rank 1 calls broadcast at a.cpp:1 where rank 0 calls all_reduce at a.cpp:1");
  EXPECT_EQ(find_mismatch({{0, mine}, {1, record(1, "all_reduce")}}), std::nullopt);
  // Of two groups the one whose call is older.
  FlightRecord two = mine, others = record(1, "broadcast");
  two.device_waits.push_back({.call = call_of("pair", 1, "x"), .ms = 9500});
  others.device_waits.push_back({.call = call_of("pair", 1, "y"), .ms = 9500});
  EXPECT_EQ(find_mismatch({{0, two}, {1, others}}).value_or("none"),
            "rank 1 calls y at a.cpp:1 where rank 0 calls x at a.cpp:1");
}

// Ends when it is told to; counts how often it is asked.
struct AskedWork : c10d::Work {
  bool isCompleted() override {
    ++num_asked;
    return has_ended;
  }
  bool has_ended = false;
  int num_asked = 0;
};

TEST(DeviceCallsTest, ACallCountsFromBeforeItBegins) {
  DeviceCalls calls({.id = "a", .name = "world", .ranks = {0, 1}});
  const auto work = c10::make_intrusive<AskedWork>();
  const auto begin = [&] {
    calls.forget_ended();
    EXPECT_TRUE(calls.oldest().has_value()) << "the host is still in it";
    return work;
  };
  EXPECT_EQ(calls.begin(call_of("a", 1, "all_reduce"), begin), work);
  EXPECT_EQ(calls.oldest().value().call.what, "all_reduce");
  EXPECT_EQ(work->num_asked, 0) << "looking does not ask the device";
  calls.forget_ended();
  EXPECT_EQ(work->num_asked, 1);
  EXPECT_TRUE(calls.oldest().has_value());
  work->has_ended = true;
  calls.forget_ended();
  EXPECT_FALSE(calls.oldest().has_value());
}

TEST(DeviceCallsTest, WhatDoesNotBeginIsNotAdded) {
  DeviceCalls calls({.id = "a", .name = "world", .ranks = {0, 1}});
  const auto fail = []() -> BackendWork { throw std::runtime_error("refused"); };
  EXPECT_THROW(calls.begin(call_of("a", 1, "x"), fail), std::runtime_error);
  EXPECT_FALSE(calls.oldest().has_value());
  calls.begin(call_of("a", 2, "x"), [] { return BackendWork(); });
  EXPECT_FALSE(calls.oldest().has_value());
  DeviceCalls without_progress({.progress = [](const c10d::Work&) { return BackendWork(); }});
  const auto work = c10::make_intrusive<AskedWork>();
  EXPECT_EQ(without_progress.begin(call_of("a", 1, "x"), [&] { return work; }), work);
  EXPECT_FALSE(without_progress.oldest().has_value());
}

DeviceWait wait_of(const std::string& group, int64_t number, int64_t ms) {
  return {.call = {.group = group, .number = number, .what = "all_reduce", .site = "a.cpp:1"},
          .name = group,
          .ranks = {0, 1, 2},
          .ms = ms,
          .timeout_ms = 60'000};
}

// Of a rank that has called `num_of_a` collectives of the group "a", and so on.
FlightRecord record_of(int64_t num_of_a, int64_t num_of_b, std::vector<DeviceWait> waits) {
  return {.ms = 500,
          .last = "x",
          .num_matched = {{"a", num_of_a}, {"b", num_of_b}},
          .device_waits = std::move(waits)};
}

TEST(DeviceWaitTest, RanksThatHaveNotCalledAreNamed) {
  const FlightRecords records{{0, record_of(2, 5, {wait_of("a", 2, 9000)})},
                              {1, record_of(1, 5, {})},
                              {2, record_of(3, 5, {wait_of("a", 2, 9000)})}};
  EXPECT_EQ(describe_device_waits(records),
            "rank 1 has not come to all_reduce at a.cpp:1, call 2 of group \"a\", for which the "
            "devices of ranks 0, 2 wait since 9.0 s: outside of collectives since 0.5 s, last "
            "called x");
  EXPECT_EQ(describe_device_waits({{0, record_of(2, 5, {})}, {1, record_of(1, 5, {})}}), "");
}

// Rank 0 has not come to "b": it waits in "a" for rank 1.
TEST(DeviceWaitTest, ARankThatWaitsItselfIsNotToBlame) {
  const FlightRecord behind = record_of(2, 5, {wait_of("a", 2, 9000)});
  const FlightRecord ahead = record_of(2, 8, {wait_of("a", 2, 9000), wait_of("b", 6, 8000)});
  const FlightRecord missing = record_of(1, 6, {});
  const std::string one = describe_device_waits({{0, behind}, {1, missing}, {2, ahead}});
  EXPECT_TRUE(one.starts_with("rank 1 has not come to all_reduce at a.cpp:1, call 2 of group"));
  EXPECT_EQ(one.find("rank 0 has"), std::string::npos) << one;
  // Here each waits for another.
  const FlightRecord crossed = record_of(1, 6, {wait_of("b", 6, 8000)});
  const std::string both = describe_device_waits({{0, behind}, {1, crossed}, {2, ahead}});
  EXPECT_NE(both.find("rank 0 has not come to all_reduce at a.cpp:1, call 6 of group \"b\""),
            std::string::npos)
      << both;
}

TEST(DeviceWaitTest, WhereAllHaveCalledNoRankIsNamed) {
  EXPECT_EQ(describe_device_waits({{0, record_of(2, 5, {wait_of("a", 2, 9000)})},
                                   {1, record_of(2, 5, {})},
                                   {2, record_of(2, 5, {})}}),
            "all ranks have called all_reduce at a.cpp:1, call 2 of group \"a\", which has not "
            "ended on the devices of rank 0 since 9.0 s");
}

TEST(DeviceWaitTest, ATenthOfTheTimeoutPassesBeforeRanksCompare) {
  EXPECT_EQ(wait_of("a", 1, 0).stuck_ms(), 6000);
  DeviceWait wait = wait_of("a", 1, 2500);
  wait.timeout_ms = 5000;
  EXPECT_TRUE(wait.is_stuck());
  EXPECT_FALSE(wait.is_overdue());
  wait.timeout_ms = 1000;
  EXPECT_EQ(wait.stuck_ms(), 1000);
  EXPECT_TRUE(wait.is_overdue());
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
    const auto start = std::chrono::steady_clock::now();
    const FailureWatch watch(StoreConnection{store, [] {}, [] {}}, 1, 2, false,
                             FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                                               .waiting_ns = [] { return std::nullopt; },
                                               .abort = [] {}});
    for (int i = 0; i < 600 && store->num_asked == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_GE(store->num_asked, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    const int num_asked = store->num_asked;
    const auto passed = std::chrono::steady_clock::now() - start;
    EXPECT_LE(num_asked, 1 + passed / std::chrono::seconds(2)) << "ten times if it polls";
  }
}

// Rank 1 declared that the job has failed, and was killed before it said who is lost.
TEST(FailureWatchTest, ADeclarerThatDiesIsReplacedAndNamed) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("declared", nlohmann::json::to_cbor(1));
  FailureWatch watch(StoreConnection{store, [] {}, {}}, 0, 2, false,
                     FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                                       .waiting_ns = [] { return std::nullopt; },
                                       .has_ended = [](int rank) { return rank == 1; },
                                       .abort = [] {}});
  const FailureReport report = watch.report();
  EXPECT_EQ(report.lost, std::vector<int>{1});
  EXPECT_EQ(report.others, "its process has ended");
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

// Of rank 1, whose device waits in a call since `age_ms`; its group's timeout is a minute.
FailureWatchCalls calls_of_device(std::atomic<int64_t>& age_ms) {
  return {.flight_record = [] { return record_of(1, {call_of("", 1, "all_reduce")}); },
          .waiting_ns = [] { return std::nullopt; },
          .device_waits = [&] { return std::vector{wait_of("a", 1, age_ms)}; },
          .abort = [] {}};
}

TEST(FailureWatchTest, ARankWhoseDeviceWaitsPublishesThenFails) {
  auto store = c10::make_intrusive<CountingStore>();
  std::atomic<int64_t> age_ms = 5000;
  const FailureWatch watch(StoreConnection{store, [] {}}, 1, 2, false, calls_of_device(age_ms));
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  EXPECT_FALSE(store->check({"record/1"})) << "a healthy device may be seconds behind its host";
  age_ms = 6000;
  store->wait({"record/1"}, std::chrono::seconds(20));
  EXPECT_FALSE(store->check({"declared"}));
  age_ms = 60'000;
  store->wait({"declared"}, std::chrono::seconds(20));
}

// More calls than are kept follow the one that waits: `matched` changes no more when it is stuck.
TEST(FailureWatchTest, ADeviceThatHasJustBecomeStuckIsPublishedToo) {
  auto store = c10::make_intrusive<CountingStore>();
  std::atomic<int64_t> age_ms = 5000;
  FailureWatchCalls calls = calls_of_device(age_ms);
  calls.waiting_ns = [] { return 3'000'000'000; };
  calls.flight_record = [&] {
    FlightRecord record = record_of(1, {call_of("", 1, "all_reduce")});
    if (age_ms >= 6000) record.device_waits = {wait_of("a", 1, age_ms)};
    return record;
  };
  const FailureWatch watch(StoreConnection{store, [] {}}, 1, 2, false, calls);
  store->wait({"record/1"}, std::chrono::seconds(20));
  age_ms = 6000;
  for (int i = 0; i < 200 && store->add("num_records", 0) < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(store->add("num_records", 0), 2);
}

TEST(FailureWatchTest, SignsOfLifeBeginWithTheFirstFollowedRank) {
  auto store = c10::make_intrusive<CountingStore>();
  FailureWatch watch(StoreConnection{store, [] {}}, 1, 2, false,
                     FailureWatchCalls{.flight_record = [] { return FlightRecord(); },
                                       .waiting_ns = [] { return std::nullopt; },
                                       .abort = [] {}});
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  EXPECT_FALSE(store->check({"beat/1"}));
  watch.follow(0);
  for (int i = 0; i < 200 && !store->check({"beat/1"}); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(store->check({"beat/1"}));
}

}  // namespace failure_watch_test
}  // namespace cohort::comm
