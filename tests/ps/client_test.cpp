// SPDX-License-Identifier: Apache-2.0
// What a trainer's side does with slow servers, threads and its own end. Without gRPC.
#include "cohort/ps/client/client.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cohort/ps/client/communicator.h"
#include "cohort/ps/client/timer_thread.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace client_test {

using cohort::test::message_of;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A server that lives (joins and heartbeats are answered at once) and takes its time for all else:
// what is not answered in time has seen a heartbeat that was, and one more, which was sent after
// it.
class SlowChannel : public Channel {
 public:
  SlowChannel(milliseconds takes, std::atomic<int>& sendings)
      : takes_(takes), sendings_(sendings) {}
  ~SlowChannel() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    calls_.clear();
  }

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kJoin) return done({});
    if (request.call == Call::kHeartbeat) {
      done({});
      const std::lock_guard lock(mutex_);
      ++heartbeats_;
      return changed_.notify_all();
    }
    ++sendings_;
    const milliseconds timeout(timeout_ms);
    const std::lock_guard lock(mutex_);
    calls_.emplace_back([this, timeout, before = heartbeats_, done = std::move(done)] {
      {
        std::unique_lock call_lock(mutex_);
        changed_.wait_for(call_lock, std::min(takes_, timeout), [this] { return closed_; });
        if (takes_ >= timeout)
          changed_.wait(call_lock, [&] { return closed_ || heartbeats_ > before + 1; });
      }
      if (takes_ < timeout) return done({});
      done({.code = Code::kLost, .text = "the time is up"});
    });
  }

 private:
  const milliseconds takes_;
  std::atomic<int>& sendings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int heartbeats_ = 0;
  bool closed_ = false;
  std::vector<std::jthread> calls_;
};

LinkOptions slow_link() {
  return {.endpoint = "slow",
          .trainer = 0,
          .attempt_timeout = milliseconds(50),
          .server_timeout = milliseconds(30'000),
          .heartbeat_period = milliseconds(20)};
}

TEST(ServerLinkTest, AnAnswerThatTakesLongerThanTheFirstAttemptArrives) {
  std::atomic<int> sendings{0};
  TimerThread timer;
  auto link = std::make_unique<ServerLink>(
      std::make_unique<SlowChannel>(milliseconds(300), sendings), slow_link(), timer);
  link->join(1);
  auto answer =
      std::async(std::launch::async, [&] { return link->call({.call = Call::kStatus}).code; });
  const bool in_time = answer.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(in_time);
  if (!in_time) link.reset();
  if (in_time) {
    EXPECT_EQ(answer.get(), Code::kOk);
  } else {
    EXPECT_THROW(answer.get(), c10::DistError);
  }
  EXPECT_LE(sendings, 4) << "50, 100, 200, 400 ms";
}

TEST(ServerLinkTest, WhatIsNeverAnsweredIsAnErrorThoughTheServerLives) {
  std::atomic<int> sendings{0};
  LinkOptions options = slow_link();
  options.attempt_timeout = milliseconds(500);
  options.server_timeout = milliseconds(2'000);
  TimerThread timer;
  auto link = std::make_unique<ServerLink>(
      std::make_unique<SlowChannel>(milliseconds(60'000), sendings), options, timer);
  link->join(1);
  auto answer = std::async(std::launch::async, [&] {
    return message_of<c10::DistError>([&] { link->call({.call = Call::kStatus}); });
  });
  EXPECT_EQ(answer.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  link.reset();
  const std::string text = answer.get();
  EXPECT_EQ(text.find("server 0 (slow): it is alive, but did not reply to a call for "), 0U)
      << text;
}

// Answers joins and heartbeats at once, all else when `go_on` is ready.
class HeldChannel : public Channel {
 public:
  explicit HeldChannel(std::shared_future<void> go_on) : go_on_(std::move(go_on)) {}

  void send(const Request& request, int64_t /*timeout_ms*/, Done done) override {
    if (request.call == Call::kJoin || request.call == Call::kHeartbeat) return done({});
    call_ = std::jthread([this, done = std::move(done)] {
      go_on_.wait_for(std::chrono::seconds(20));
      done({});
    });
  }

 private:
  const std::shared_future<void> go_on_;
  std::jthread call_;
};

TEST(ServerLinkTest, ItSaysForWhomItWaitsWhileTheCallIsThere) {
  constexpr milliseconds kPeriod(100);
  std::promise<void> go_on;
  std::vector<std::string> said;
  LinkOptions options = slow_link();
  options.notice_period = kPeriod;
  options.on_wait = [&](const std::string& line) {
    said.push_back(line);
    if (said.size() == 2) go_on.set_value();
  };
  const auto began = steady_clock::now();
  {
    TimerThread timer;
    ServerLink link(std::make_unique<HeldChannel>(go_on.get_future().share()), options, timer);
    link.join(1);
    link.call({.call = Call::kStatus});
  }
  ASSERT_GE(said.size(), 2U);
  EXPECT_LE(static_cast<int64_t>(said.size()), (steady_clock::now() - began) / kPeriod)
      << "one a period";
  EXPECT_EQ(said.front(), "server 0 (slow): waiting: no reply yet");
}

// Lives, and has no room.
class FullChannel : public Channel {
 public:
  void send(const Request& request, int64_t /*timeout_ms*/, Done done) override {
    if (request.call == Call::kJoin || request.call == Call::kHeartbeat) return done({});
    done({.code = Code::kBusy, .text = "the log: cannot write: No space left on device"});
  }
};

TEST(ServerLinkTest, AServerWhoseDiskStaysFullIsGivenUp) {
  LinkOptions options = slow_link();
  options.trainer_timeout = milliseconds(100);
  TimerThread timer;
  auto link = std::make_unique<ServerLink>(std::make_unique<FullChannel>(), options, timer);
  link->join(1);
  auto answers = std::async(std::launch::async, [&] {
    link->push(MessageWriter({}), 1);
    return std::pair(message_of<c10::DistError>([&] { link->flush(); }),
                     message_of<c10::DistError>([&] { link->leave(); }));
  });
  EXPECT_EQ(answers.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  link.reset();
  const auto [flushed, left] = answers.get();
  for (const std::string& text : {flushed, left}) {
    EXPECT_EQ(text.find("server 0 (slow): waited "), 0U) << text;
    EXPECT_NE(text.find("the log: cannot write: No space left on device"), std::string::npos)
        << text;
  }
}

// Restarts after the first push, without it.
class ForgetfulChannel : public Channel {
 public:
  void send(const Request& request, int64_t /*timeout_ms*/, Done done) override {
    if (request.call == Call::kJoin) return done({.server_incarnation = ++joins_});
    if (request.call != Call::kPush || ++pushes_ == 1) return done({});
    done({.code = Code::kRestarted});
  }

 private:
  uint64_t joins_ = 0;
  int pushes_ = 0;
};

TEST(ServerLinkTest, AServerThatLostWhatItHadAcknowledgedIsNamed) {
  TimerThread timer;
  ServerLink link(std::make_unique<ForgetfulChannel>(), slow_link(), timer);
  link.join(1);
  link.push(MessageWriter({}), 1).wait();
  EXPECT_EQ(message_of<c10::DistError>([&] { link.push(MessageWriter({}), 2).wait(); }),
            "server 0 (slow): it restarted without push 1, which it had acknowledged: it "
            "has 0 of this trainer's");
}

// A thread of its own for each server would be many.
TEST(ClientTest, OneThreadServesTheLinksToAllServers) {
  const auto num_timers = [] {
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      count += name == "ps-timer";
    }
    return count;
  };
  Cluster cluster(3);
  EXPECT_EQ(num_timers(), 0);
  const auto client = cluster.client(0, ledger_job(1, 3, Mode::kAsync));
  EXPECT_EQ(num_timers(), 1);
}

// Under the thread sanitizer it is the counts that are looked at.
TEST(ClientTest, OneThreadPullsWhileAnotherPushes) {
  Cluster cluster(2);
  const auto client = cluster.client(0, ledger_job(1, 2, Mode::kAsync));
  constexpr int kPushes = 300;
  const std::vector<uint64_t> ids{1, 2, 3, 4};
  std::jthread pushing([&] {
    const std::vector<float> gradients(8, -1);
    const PushRows pushed{0, ids, gradients};
    for (int i = 0; i < kPushes; ++i) client->push(std::span(&pushed, 1), {});
  });
  std::vector<float> before(8), now(8);
  const PullRows asked{0, ids, now};
  for (int i = 0; i < 100; ++i) {
    client->pull(std::span(&asked, 1), {}).wait();
    for (size_t j = 0; j < now.size(); ++j) EXPECT_GE(now[j], before[j]);
    before = now;
  }
  pushing.join();
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(now, std::vector<float>(8, kPushes));
}

TEST(HalfAsyncCommunicatorTest, ItEndsAtOnceWhileItsPushWaitsForALostServer) {
  Cluster cluster(1);
  LinkOptions link = quick_link();
  link.max_in_flight_bytes = 1;
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync), link);
  cluster.end(0);
  const std::vector<uint64_t> ids{1};
  const std::vector<float> gradient(2, -1);
  auto communicator = make_half_async_communicator(*client, 1);
  // One is in flight, one waits for its credit, one for its turn.
  for (int i = 0; i < 3; ++i) communicator->push({{0, ids, gradient}}, {});
  const auto began = steady_clock::now();
  communicator.reset();
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(15)) << "a server has 20 s";
}

// Refuses one pull.
class RefusingChannel : public Channel {
 public:
  explicit RefusingChannel(std::unique_ptr<Channel> channel, int which = 1)
      : channel_(std::move(channel)), left_(which) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kPull && --left_ == 0)
      return done({.code = Code::kInvalid, .text = "not this one"});
    channel_->send(request, timeout_ms, std::move(done));
  }

 private:
  const std::unique_ptr<Channel> channel_;
  std::atomic<int> left_;
};

TEST(GeoCommunicatorTest, AChangeIsSentOnceWhereThePullBehindItFails) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].rule = {.rule = Rule::kAdd};
  Client client(
      {.servers = {"refusing"}, .trainer = 0, .link = quick_link()}, job,
      [&](int server) { return std::make_unique<RefusingChannel>(cluster.channel(server), 2); });
  const auto communicator = make_geo_communicator(
      client, {.table_rules = {{.rule = Rule::kSgd, .learning_rate = 1}}, .steps = 1});
  const std::vector<uint64_t> ids{1};
  const std::vector<float> gradient{-1, -2};
  std::vector<float> row(2);
  communicator->pull({{0, ids, row}}, {})();
  EXPECT_THROW(communicator->push({{0, ids, gradient}}, {}), c10::ValueError);
  communicator->flush();
  const PullRows asked{0, ids, row};
  client.pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(row, (std::vector<float>{1, 2}));
}

TEST(GeoCommunicatorTest, APullThatFailsLeavesNoRowBehind) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].rule = {.rule = Rule::kAdd};
  job.tables[0].initializer = {.kind = Initializer::Kind::kUniform, .scale = 1};
  Client client(
      {.servers = {"refusing"}, .trainer = 0, .link = quick_link()}, job,
      [&](int server) { return std::make_unique<RefusingChannel>(cluster.channel(server)); });
  const auto communicator =
      make_geo_communicator(client, {.table_rules = {{.rule = Rule::kSgd, .learning_rate = 1}}});
  const std::vector<uint64_t> ids{1, 2, 3};
  std::vector<float> rows(6), expected(6);
  EXPECT_THROW(communicator->pull({{0, std::span(ids).first(2), std::span(rows).first(4)}}, {})(),
               c10::ValueError);
  communicator->pull({{0, ids, rows}}, {})();
  const PullRows asked{0, ids, expected};
  client.pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(rows, expected);
}

}  // namespace client_test
}  // namespace cohort::ps
