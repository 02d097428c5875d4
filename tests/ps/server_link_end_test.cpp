// SPDX-License-Identifier: Apache-2.0
// How a trainer's line to a server ends for good. Without gRPC.
#include <atomic>
#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include "cohort/ps/client/server_link.h"
#include "cohort/ps/client/timer_thread.h"

#include "tests/support/message_of.h"

namespace cohort::ps {
namespace server_link_end_test {

using cohort::test::message_of;
using std::chrono::milliseconds;

LinkOptions options_of_link() {
  return {.endpoint = "test",
          .trainer = 0,
          .attempt_timeout = milliseconds(5'000),
          .heartbeat_period = milliseconds(20)};
}

// A server that was started again without its state. Never says what its status is.
class EmptyServerChannel : public Channel {
 public:
  explicit EmptyServerChannel(std::atomic<int>& joins) : joins_(joins) {}

  void send(const Request& request, int64_t /*timeout_ms*/, Done done) override {
    switch (request.call) {
      case Call::kJoin:
        return done({.code = ++joins_ == 1 ? Code::kOk : Code::kNotYet});
      case Call::kPush:
      case Call::kPull:
        return done({.code = Code::kRestarted});
      case Call::kStatus:
        held_ = std::move(done);
        return;
      default:
        return done({});
    }
  }

 private:
  std::atomic<int>& joins_;
  Done held_;
};

// Notices of the call that waits come from the timer's thread: it runs on meanwhile.
TEST(ServerLinkEndTest, WhatFailedToJoinAgainIsNotTriedForEver) {
  std::atomic<int> joins{0};
  std::promise<void> said;
  int notices = 0;
  LinkOptions options = options_of_link();
  options.notice_period = milliseconds(100);  // Five heartbeats.
  options.on_wait = [&](const std::string&) {
    if (++notices == 4) said.set_value();
  };
  TimerThread timer;
  auto link =
      std::make_unique<ServerLink>(std::make_unique<EmptyServerChannel>(joins), options, timer);
  link->join(1);
  const ReplyFuture held = link->begin({.call = Call::kStatus});
  const std::string expected = "server 0 (test): it restarted without its state";
  EXPECT_EQ(message_of<c10::DistError>([&] { link->push(MessageWriter({}), 1).wait(); }), expected);
  EXPECT_EQ(said.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(joins, 2) << "the first, and the one that failed";
  // What comes later is told the same, and asks nobody to join.
  auto later = std::async(std::launch::async, [&] {
    return message_of<c10::DistError>([&] { link->pull(MessageWriter({}), 0, 0).wait(); });
  });
  EXPECT_EQ(later.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  link.reset();
  EXPECT_EQ(later.get(), expected);
  EXPECT_EQ(joins, 2);
}

// Another process has this trainer's number. The server has no room for now.
class ReplacedChannel : public Channel {
 public:
  explicit ReplacedChannel(std::atomic<int>& heartbeats) : heartbeats_(heartbeats) {}

  void send(const Request& request, int64_t /*timeout_ms*/, Done done) override {
    if (request.call == Call::kJoin) return done({});
    if (request.call != Call::kHeartbeat) return done({.code = Code::kBusy, .text = "no room"});
    ++heartbeats_;
    done({.code = Code::kReplaced, .text = "trainer 0: another process has joined"});
  }

 private:
  std::atomic<int>& heartbeats_;
};

TEST(ServerLinkEndTest, ATrainerThatWasReplacedLearnsItFromItsHeartbeats) {
  std::atomic<int> heartbeats{0};
  TimerThread timer;
  auto link = std::make_unique<ServerLink>(std::make_unique<ReplacedChannel>(heartbeats),
                                           options_of_link(), timer);
  link->join(1);
  auto answer = std::async(std::launch::async, [&] {
    return message_of<c10::DistError>([&] { link->push(MessageWriter({}), 1).wait(); });
  });
  EXPECT_EQ(answer.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  link.reset();
  EXPECT_EQ(answer.get(), "server 0 (test): trainer 0: another process has joined");
  EXPECT_EQ(heartbeats, 1) << "no word more of a process that was replaced";
}

}  // namespace server_link_end_test
}  // namespace cohort::ps
