// SPDX-License-Identifier: Apache-2.0
// The rules of the game, one promise a case: what a server answers to pushes and pulls that come
// twice, too early, from the wrong ones or not at all.
#include "cohort/ps/server/server.h"

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/id_hash.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace server_test {

using cohort::test::message_of;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

json status_of(Cluster& cluster, int server = 0) {
  return json::parse(cluster.ask(server, {.call = Call::kStatus}).text);
}

// The last one, whose answer was lost, and one before it, which the network had kept.
TEST(ServerTest, APushThatComesTwiceIsAppliedOnceAndAnsweredTwice) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const Request first = trainer.push(1), second = trainer.push(2);
  EXPECT_EQ(cluster.ask(0, first).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, first).code, Code::kOk);
  EXPECT_EQ(trainer.weight(1), 1);
  EXPECT_EQ(cluster.ask(0, second).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, first).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, second).code, Code::kOk);
  EXPECT_EQ(trainer.weight(1), 2);
  EXPECT_EQ(status_of(cluster)["duplicates"], 3);
}

TEST(ServerTest, PushesThatOvertakeEachOtherAreAppliedInTheirOrder) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  // So many that answering one from within the other would take all of the stack.
  constexpr uint64_t kPushes = 30'000;
  std::vector<std::future<Reply>> answers;
  for (uint64_t sequence = kPushes; sequence > 0; --sequence)
    answers.push_back(cluster.send(0, trainer.push(sequence, {1})));
  uint64_t applied = 0;
  for (auto& answer : answers) {
    const Code code = answer.get().code;
    EXPECT_TRUE(code == Code::kOk || code == Code::kNotYet) << to_string(code);
    applied += code == Code::kOk;
  }
  EXPECT_EQ(trainer.weight(1), static_cast<float>(applied));
  EXPECT_GT(applied, 0U);
}

TEST(ServerTest, APushWhoseForerunnerIsMissingIsAskedForAgain) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const Reply reply = cluster.ask(0, trainer.push(2));
  EXPECT_EQ(reply.code, Code::kNotYet);
  EXPECT_EQ(reply.text, "an earlier push of this trainer is missing");
  EXPECT_EQ(trainer.weight(1), 0);
}

TEST(ServerTest, MessagesForAnEarlierIncarnationAreTurnedBack) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  ASSERT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
  cluster.restart(0);
  for (const Request& late : {trainer.push(1), trainer.push(2), trainer.pull({1})}) {
    const Reply reply = cluster.ask(0, late);
    EXPECT_EQ(reply.code, Code::kRestarted);
    EXPECT_EQ(reply.text, "the server is incarnation 2 now, the message is for 1");
  }
  trainer.header.server_incarnation = 2;
  EXPECT_EQ(trainer.weight(1), 1);
}

TEST(ServerTest, AReplacedTrainerIsToldSo) {
  Cluster cluster(1);
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  RawTrainer old(cluster, job, 0, 11);
  ASSERT_EQ(cluster.ask(0, old.push(1)).code, Code::kOk);
  RawTrainer newer(cluster, job, 0, 12);
  EXPECT_EQ(newer.joined.steps, 1U);
  EXPECT_EQ(newer.joined.joined_after, 0U) << "a member from the first on";
  EXPECT_EQ(newer.joined.last_sequence, 1U);
  for (const Request& late : {old.push(2), old.pull({1})}) {
    const Reply reply = cluster.ask(0, late);
    EXPECT_EQ(reply.code, Code::kReplaced);
    EXPECT_EQ(reply.text, "trainer 0: another process has joined under this number");
  }
  EXPECT_EQ(cluster.ask(0, newer.push(2)).code, Code::kOk);
  EXPECT_EQ(newer.weight(1), 2);
}

// Each number is remembered for good, and every step of a sync job waits for it.
TEST(ServerTest, ATrainerOfANumberBeyondAllIsRefused) {
  Cluster cluster(1);
  const JobOptions job = ledger_job(1, 1, Mode::kSync);
  const RawTrainer first(cluster, job, 0);
  ASSERT_EQ(first.joined.code, Code::kOk);
  for (const uint32_t number : {4096U, uint32_t{1} << 31, kNoTrainer - 1}) {
    const Reply reply = cluster.ask(
        0, {.call = Call::kJoin, .trainer = number, .job = job.fingerprint(), .nonce = 7});
    EXPECT_EQ(reply.code, Code::kInvalid);
    EXPECT_EQ(reply.text, "join: trainer " + std::to_string(number) +
                              ": expected a number below max_trainers, 4096");
  }
  EXPECT_EQ(status_of(cluster)["trainers"].size(), 1U);
  EXPECT_EQ(cluster.ask(0, first.push(1)).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, first.pull({1}, 1)).code, Code::kOk) << "its step has closed";
  const RawTrainer last(cluster, job, 4095);
  EXPECT_EQ(last.joined.code, Code::kOk);
}

// A request to join that the network delivers twice must not throw out who sent it.
TEST(ServerTest, JoiningIsRepeatedWithoutHarm) {
  Cluster cluster(1);
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  RawTrainer trainer(cluster, job, 0, 11);
  const Request again{.call = Call::kJoin, .trainer = 0, .job = job.fingerprint(), .nonce = 11};
  const Reply reply = cluster.ask(0, again);
  EXPECT_EQ(reply.code, Code::kOk);
  EXPECT_EQ(reply.trainer_incarnation, trainer.joined.trainer_incarnation);
  EXPECT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
  cluster.restart(0);  // Also across the log.
  EXPECT_EQ(cluster.ask(0, again).trainer_incarnation, trainer.joined.trainer_incarnation);
  // One that has left stays away.
  cluster.ask(0, {.call = Call::kLeave, .trainer = 0, .incarnation = 1});
  EXPECT_EQ(cluster.ask(0, again).code, Code::kReplaced);
}

TEST(ServerTest, ALostTrainerEndsTheJobByName) {
  Cluster cluster(1, {.trainer_timeout = milliseconds(3'000)});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  const auto first = cluster.client(0, job);
  RawTrainer second(cluster, job, 1);
  ASSERT_EQ(cluster.ask(0, second.push(1)).code, Code::kOk);
  std::vector<uint64_t> ids{1};
  std::vector<float> row(2, -1);
  const PushRows pushed{0, ids, row};
  const PullRows asked{0, ids, row};
  const auto began = steady_clock::now();
  const std::string text = message_of<c10::DistError>([&] {
    for (int step = 0; step < 3; ++step) {
      first->push(std::span(&pushed, 1), {});
      first->pull(std::span(&asked, 1), {}).wait();
    }
  });
  EXPECT_TRUE(std::regex_match(
      text, std::regex(R"(server 0 \(in-process:0\): trainer 1 sent nothing for \d+ s; )"
                       "its last push was number 1.*")))
      << text;
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(15)) << "its call waits for 20 s";
}

// The process that was replaced lives on. Its word is not that of the one that has its number.
TEST(ServerTest, AProcessThatWasReplacedDoesNotKeepItsSuccessorAlive) {
  Cluster cluster(1, {.trainer_timeout = milliseconds(1'000)});
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  const RawTrainer old(cluster, job, 0, 11);
  const RawTrainer successor(cluster, job, 0, 12);
  const Request heartbeat{
      .call = Call::kHeartbeat, .trainer = 0, .incarnation = old.joined.trainer_incarnation};
  const auto end = steady_clock::now() + std::chrono::seconds(20);
  std::string failure;
  while (failure.empty() && steady_clock::now() < end) {
    const Reply reply = cluster.ask(0, heartbeat);
    if (reply.code == Code::kFailed) break;
    ASSERT_EQ(reply.code, Code::kReplaced);
    EXPECT_EQ(reply.text, "trainer 0: another process has joined under this number");
    for (const Request& late : {old.push(1), old.pull({1})}) cluster.ask(0, late);
    cluster.ask(0, {.call = Call::kStatus, .trainer = 0});
  }
  EXPECT_EQ(status_of(cluster)["failure"].get<std::string>().find("trainer 0 sent nothing"), 0U);
}

// The answer to what was sent, which may have waited for longer than a server lets it.
Code code_of(Cluster& cluster, std::future<Reply>& answer, const Request& request) {
  Code code = answer.get().code;
  for (int i = 0; i < 10 && code == Code::kNotYet; ++i) code = cluster.ask(0, request).code;
  return code;
}

TEST(ServerTest, ALostTrainerIsWaitedForAndItsSuccessorGoesOn) {
  Cluster cluster(1,
                  {.on_trainer_loss = OnTrainerLoss::kWait, .trainer_timeout = milliseconds(300)});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  RawTrainer first(cluster, job, 0, 1);
  RawTrainer second(cluster, job, 1, 2);
  ASSERT_EQ(cluster.ask(0, first.push(1)).code, Code::kOk);
  const Reply reply = cluster.ask(0, first.pull({1}, 1));
  EXPECT_EQ(reply.code, Code::kNotYet);
  EXPECT_EQ(reply.text, "step 1 waits for trainer 1");
  auto waiting = cluster.send(0, first.pull({1}, 1));
  RawTrainer successor(cluster, job, 1, 3);
  ASSERT_EQ(cluster.ask(0, successor.push(1)).code, Code::kOk);
  EXPECT_EQ(code_of(cluster, waiting, first.pull({1}, 1)), Code::kOk);
  EXPECT_EQ(first.weight(1), 2);
}

TEST(ServerTest, WithoutALostTrainerStepsGoOnAndItIsToldSo) {
  Cluster cluster(
      1, {.on_trainer_loss = OnTrainerLoss::kContinue, .trainer_timeout = milliseconds(3'000)});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  RawTrainer lost(cluster, job, 1);
  const auto first = cluster.client(0, job);
  std::vector<uint64_t> ids{1};
  std::vector<float> row(2, -1);
  const PushRows pushed{0, ids, row};
  const PullRows asked{0, ids, row};
  const auto began = steady_clock::now();
  first->push(std::span(&pushed, 1), {});
  EXPECT_EQ(first->pull(std::span(&asked, 1), {}).wait(), 1U);
  EXPECT_EQ(row[0], 1);
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(15)) << "its call waits for 20 s";
  const Reply reply = cluster.ask(0, lost.push(1));
  EXPECT_EQ(reply.code, Code::kReplaced);
  EXPECT_EQ(reply.text,
            "trainer 1 has left, or was dropped after it was silent for 3 s: restart it to join");
}

// A server that stood still itself (here: a callback that holds its thread, elsewhere SIGSTOP, or
// memory that had to come from a disk) has heard nobody, and blames nobody.
TEST(ServerTest, TimeInWhichTheServerStoodStillIsNoTrainersSilence) {
  Cluster cluster(1, {.trainer_timeout = milliseconds(2'000)});
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  const auto client = cluster.client(0, job);
  for (int i = 0; i < 2; ++i) {
    std::promise<void> over;
    cluster.slot(0).get()->submit({.call = Call::kStatus}, [&over](const Reply&) {
      std::this_thread::sleep_for(milliseconds(2'500));
      over.set_value();
    });
    over.get_future().wait();
  }
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(status_of(cluster)["failure"], "");
}

TEST(ServerTest, TheLeadOfATrainerNeverPassesTheBound) {
  constexpr int64_t kBound = 2;
  Cluster cluster(1, {}, {.seed = 2, .twice = 0.1, .late = 0.3, .latest = milliseconds(2)});
  JobOptions job = ledger_job(3, 1, Mode::kAsync);
  job.max_staleness = kBound;
  std::array<std::atomic<int64_t>, 3> pushed{};
  std::atomic<int64_t> most{0};
  std::vector<std::thread> threads;
  for (uint32_t trainer = 0; trainer < 3; ++trainer) {
    threads.emplace_back([&, trainer] {
      const auto client = cluster.client(trainer, job);
      std::mt19937 random(trainer);
      std::vector<uint64_t> ids{trainer};
      std::vector<float> row(2, -1);
      const PushRows push{0, ids, row};
      const PullRows pull{0, ids, row};
      for (int step = 0; step < 60; ++step) {
        client->pull(std::span(&pull, 1), {}).wait();
        // The others' counts are read late, and so at least what they were: the lead that is seen
        // is at most the true one. One's own is of the pushes before the pull.
        int64_t slowest = INT64_MAX;
        for (auto& count : pushed) slowest = std::min(slowest, count.load());
        const int64_t lead = pushed[trainer].load() - slowest;
        for (int64_t seen = most; seen < lead && !most.compare_exchange_weak(seen, lead);) continue;
        client->push(std::span(&push, 1), {});
        client->flush();
        ++pushed[trainer];
        if (trainer == 2) std::this_thread::sleep_for(milliseconds(random() % 4));
        // Once it stands still until another one comes as far as it may.
        for (int i = 0; trainer == 2 && step == 30 && most < kBound && i < 20'000; ++i)
          std::this_thread::sleep_for(milliseconds(1));
      }
      client->leave();
    });
  }
  for (auto& thread : threads) thread.join();
  // A count goes up after the server has the push: at most one for the slowest.
  EXPECT_LE(most, kBound + 1);
  EXPECT_GE(most, kBound) << "the fast ones were held back by the bound, not by each other";
}

TEST(ServerTest, TheServersOwnCountOfTheLeadIsTheBound) {
  Cluster cluster(1);
  JobOptions job = ledger_job(2, 1, Mode::kAsync);
  job.max_staleness = 1;
  RawTrainer fast(cluster, job, 0);
  RawTrainer slow(cluster, job, 1);
  ASSERT_EQ(cluster.ask(0, fast.push(1)).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, fast.pull({1})).code, Code::kOk) << "one ahead";
  ASSERT_EQ(cluster.ask(0, fast.push(2)).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, fast.pull({1})).code, Code::kNotYet) << "two ahead";
  auto waiting = cluster.send(0, fast.pull({1}));
  ASSERT_EQ(cluster.ask(0, slow.push(1)).code, Code::kOk);
  EXPECT_EQ(code_of(cluster, waiting, fast.pull({1})), Code::kOk);
  EXPECT_EQ(status_of(cluster)["trainers"][0]["lead"], 1);
}

TEST(ServerTest, OneThatIsTooFarAheadIsToldWhoTheSlowestIs) {
  Cluster cluster(1);
  JobOptions job = ledger_job(3, 1, Mode::kAsync);
  job.max_staleness = 1;
  RawTrainer fast(cluster, job, 0);
  RawTrainer other(cluster, job, 1);
  for (uint64_t sequence = 1; sequence <= 2; ++sequence)
    ASSERT_EQ(cluster.ask(0, fast.push(sequence)).code, Code::kOk);
  ASSERT_EQ(cluster.ask(0, other.push(1)).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, fast.pull({1})).text, "step 4 waits for trainer 2") << "it is to come";
  RawTrainer slow(cluster, job, 2);
  EXPECT_EQ(cluster.ask(0, fast.pull({1})).text, "step 4 waits for trainer 2") << "it is there";
}

TEST(ServerTest, ATrainerSeesItsOwnPushesInEveryPullAfterThem) {
  Cluster cluster(1, {}, {.seed = 6, .lose = 0.02, .twice = 0.1, .late = 0.5});
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync));
  const std::vector<uint64_t> ids{1};
  const std::vector<float> gradient(2, -1);
  std::vector<float> row(2);
  const PushRows pushed{0, ids, gradient};
  const PullRows asked{0, ids, row};
  for (int step = 1; step <= 40; ++step) {
    client->push(std::span(&pushed, 1), {});  // Not flushed: the pull may overtake it.
    client->pull(std::span(&asked, 1), {}).wait();
    ASSERT_EQ(row[0], static_cast<float>(step));
  }
}

TEST(ServerTest, AFullQueueTurnsAwayAndTheTrainersComeBack) {
  Cluster cluster(1, {.max_queue_bytes = 20'000});
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  RawTrainer raw(cluster, job, 0);
  std::vector<uint64_t> ids(1'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  HeldServer held(*cluster.slot(0).get());
  std::vector<std::future<Reply>> answers;
  for (uint64_t sequence = 1; sequence <= 20; ++sequence)  // 16 kB each.
    answers.push_back(cluster.send(0, raw.push(sequence, ids)));
  int busy = 0;
  for (auto& answer : answers) {
    if (answer.wait_for(milliseconds(0)) != std::future_status::ready) continue;
    const Reply reply = answer.get();
    EXPECT_EQ(reply.code, Code::kBusy);
    EXPECT_EQ(reply.text, "the server's queue is full");
    ++busy;
  }
  EXPECT_EQ(busy, 19);
  held.release();
  // A client's pushes all arrive, whatever is turned away.
  const auto client = cluster.client(0, job);
  std::vector<float> rows(2 * ids.size(), -1);
  const PushRows pushed{0, ids, rows};
  for (int i = 0; i < 30; ++i) client->push(std::span(&pushed, 1), {});
  client->flush();
  const PullRows asked{0, ids, rows};
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(rows[0], 31);
  EXPECT_EQ(rows.back(), 31);
}

// A busy server's queue is never empty: the message must not wait for that.
TEST(ServerTest, AMessageLargerThanTheQueueIsTakenBesideOthers) {
  Cluster cluster(1, {.max_queue_bytes = 20'000});
  RawTrainer raw(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  std::vector<uint64_t> few(1), many(2'000);
  HeldServer held(*cluster.slot(0).get());
  std::vector<std::future<Reply>> answers;
  answers.push_back(cluster.send(0, raw.push(1, few)));
  answers.push_back(cluster.send(0, raw.push(2, many)));  // 32 kB
  answers.push_back(cluster.send(0, raw.push(3, many)));
  const auto is_refused = [](std::future<Reply>& answer) {
    return answer.wait_for(milliseconds(0)) == std::future_status::ready;
  };
  EXPECT_FALSE(is_refused(answers[0]));
  EXPECT_FALSE(is_refused(answers[1]));
  ASSERT_TRUE(is_refused(answers[2])) << "one at a time";
  EXPECT_EQ(answers[2].get().code, Code::kBusy);
  held.release();
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(answers[i].get().code, Code::kOk);
}

// A trainer that does not read, or many at once: rows may repeat, so an answer is larger than what
// asked for it.
TEST(ServerTest, AnswersThatNobodyHasTakenAreBounded) {
  constexpr int64_t kWidth = 64;
  constexpr int64_t kRow = kWidth * sizeof(float);
  constexpr size_t kRows = 1000;
  Cluster cluster(1, {.max_queue_bytes = 3 * kRow * static_cast<int64_t>(kRows)});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync, kWidth), 0);
  const std::vector<uint64_t> ids(kRows, 1);
  std::vector<Reply> answers;
  for (int i = 0; i < 3; ++i) {
    answers.push_back(cluster.ask(0, trainer.pull(ids)));
    ASSERT_EQ(answers.back().code, Code::kOk) << answers.back().text;
  }
  const Reply busy = cluster.ask(0, trainer.pull(ids));
  EXPECT_EQ(busy.code, Code::kBusy);
  EXPECT_EQ(busy.text, "answers of 768000 bytes have not been taken by trainers yet");
  answers.pop_back();
  EXPECT_EQ(cluster.ask(0, trainer.pull(ids)).code, Code::kOk);
  answers.clear();
  EXPECT_EQ(cluster.ask(0, trainer.pull(std::vector<uint64_t>(4 * kRows, 1))).code, Code::kOk)
      << "one always goes";
}

TEST(ServerTest, ATextOverAMebibyteIsRefused) {
  Cluster cluster(1);
  const auto ask = [&](size_t bytes) {
    return cluster.ask(0, {.call = Call::kJob, .trainer = 0, .text = std::string(bytes, ' ')});
  };
  const Reply reply = ask((1 << 20) + 1);
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text.find("a request's text has 1048577 bytes; expected at most 1048576"), 0U)
      << reply.text;
  EXPECT_EQ(ask(1 << 20).text.find("a request's text"), std::string::npos);
}

TEST(ServerTest, WhatWaitsTakesNoMoreThanHalfOfTheQueue) {
  const int busy = in_less_than_a_second([] {
    Cluster cluster(1, {.max_queue_bytes = 100'000});
    RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
    const std::vector<uint64_t> ids(1'000, 1);  // 16 kB.
    std::vector<std::future<Reply>> answers;
    for (uint64_t sequence = 2; sequence <= 40; ++sequence) {
      answers.push_back(cluster.send(0, trainer.push(sequence, ids)));
      status_of(cluster);  // The queue is empty again.
    }
    int refused = 0;
    for (auto& answer : answers)
      refused += answer.wait_for(milliseconds(0)) == std::future_status::ready &&
                 answer.get().code == Code::kBusy;
    EXPECT_EQ(cluster.ask(0, trainer.push(1, ids)).code, Code::kOk) << "there is room for it";
    return refused;
  });
  EXPECT_EQ(busy, 39 - 3);
}

TEST(ServerTest, ATrainerThatRunsAheadOfTheStepIsHeldBack) {
  Cluster cluster(1, {.max_queue_bytes = 100'000});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  RawTrainer fast(cluster, job, 0);
  RawTrainer slow(cluster, job, 1);
  const std::vector<uint64_t> ids(1'000, 1);
  uint64_t sequence = 0;
  Reply reply;
  do {
    reply = cluster.ask(0, fast.push(++sequence, ids));
  } while (reply.code == Code::kOk && sequence < 100);
  EXPECT_EQ(reply.code, Code::kBusy);
  EXPECT_EQ(reply.text, "step 1 waits for trainer 1");
  EXPECT_EQ(sequence, 7U);
  EXPECT_LT(status_of(cluster)["pending_bytes"], 100'000);
  for (uint64_t step = 1; step <= 3; ++step)
    EXPECT_EQ(cluster.ask(0, slow.push(step, ids)).code, Code::kOk) << "the open step has room";
  EXPECT_EQ(cluster.ask(0, fast.push(sequence, ids)).code, Code::kOk);
}

TEST(ServerTest, AnotherJobIsNamed) {
  Cluster cluster(1);
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync));
  const std::string text =
      message_of<c10::ValueError>([&] { cluster.client(1, ledger_job(1, 1, Mode::kAsync, 3)); });
  EXPECT_EQ(text,
            "server 0 (in-process:0): job: this server has another one: /tables/0/width is 2, this "
            "trainer's 3");
  EXPECT_NE(
      message_of<c10::ValueError>([&] {
        cluster.client(0, ledger_job(1, 1, Mode::kSync));
      }).find("job: this server has another one: /mode is \"async\", this trainer's \"sync\""),
      std::string::npos);
  EXPECT_NE(message_of<ConfigError>([&] {
              cluster.client(0, ledger_job(1, 2, Mode::kSync));
            }).find("the job has 2 servers"),
            std::string::npos);
}

// One line for every trainer, whatever differs first in the text of a job.
TEST(ServerTest, TheFirstFieldOfAnotherJobIsNamed) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.blocks = {{.parameter = "p", .begin = 0, .end = 8, .server = 0}};
  ASSERT_EQ(cluster.ask(0, {.call = Call::kJob, .trainer = 0, .text = job.to_json()}).code,
            Code::kOk);
  const auto said = [&](const std::function<void(JobOptions&)>& change) {
    JobOptions other = job;
    change(other);
    const Request set{.call = Call::kJob, .trainer = 0, .text = other.to_json()};
    const Request join{
        .call = Call::kJoin, .trainer = 1, .job = other.fingerprint(), .text = other.to_json()};
    const std::string text = cluster.ask(0, set).text;
    EXPECT_EQ(cluster.ask(0, join).text, text);
    return text;
  };
  const std::string begin = "job: this server has another one: ";
  EXPECT_EQ(said([](JobOptions& other) {
              other.servers = 2;
              other.blocks = {{.parameter = "p", .begin = 0, .end = 4, .server = 0},
                              {.parameter = "p", .begin = 4, .end = 8, .server = 1}};
            }),
            begin + "/servers is 1, this trainer's 2");
  EXPECT_EQ(said([](JobOptions& other) { other.trainers = 3; }),
            begin + "/trainers is 1, this trainer's 3");
  EXPECT_EQ(said([](JobOptions& other) { other.blocks[0].end = 4; }),
            begin + "/blocks/0/end is 8, this trainer's 4");
  EXPECT_EQ(said([](JobOptions& other) {
              other.tables.push_back(other.tables[0]);
              other.tables[1].name = "more";
            }),
            begin + "/tables are 1, this trainer's 2");
  const Reply older =
      cluster.ask(0, {.call = Call::kJoin, .trainer = 1, .job = job.fingerprint() + 1});
  EXPECT_EQ(older.text, "job: this server has another one") << "its trainer did not say which";
}

TEST(ServerTest, MessagesThatDoNotFitTheJobAreRefusedByName) {
  Cluster cluster(2);
  const JobOptions job = ledger_job(1, 2, Mode::kAsync);
  cluster.ask(1, {.call = Call::kJob, .trainer = 0, .text = job.to_json()});
  RawTrainer trainer(cluster, job, 0);
  uint64_t foreign = 0;  // A row of server 1.
  while (server_of(foreign, 2) == 0) ++foreign;
  const Reply other = cluster.ask(0, trainer.push(1, {foreign}));
  EXPECT_EQ(other.code, Code::kInvalid);
  EXPECT_EQ(other.text, "message: row " + std::to_string(foreign) +
                            " of table 'rows' is server 1's, this is server 0");
  // Values of rows in the place of initial values of blocks, of which this server has none.
  Request initial = trainer.push(0, {});
  Buffer bytes(initial.message->size());
  std::copy_n(initial.message->span().data(), bytes.size(), bytes.data());
  Header header = trainer.header;
  header.flags = kInitialValues;
  header.num_sections = 1;
  reseal(bytes.span(), header);
  initial.message = std::make_shared<const Buffer>(std::move(bytes));
  EXPECT_EQ(cluster.ask(0, initial).text, "message: initial values of 1 blocks, server 0 has 0");
}

// Its answer would have room for more than the block's elements.
TEST(ServerTest, ABlockThatIsAskedForWithAnotherWidthIsRefused) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.blocks = {{"net", 0, 4, 0}};
  RawTrainer trainer(cluster, job, 0);
  const SectionShape shape{
      .kind = SectionKind::kBlock, .table = 0, .width = 2, .count = 4, .has_values = false};
  Header header = trainer.header;
  header.kind = MessageKind::kPull;
  const Reply reply = cluster.ask(
      0, {.call = Call::kPull,
          .trainer = 0,
          .message = std::make_shared<const Buffer>(MessageWriter({&shape, 1}).finish(header))});
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text, "message: block 0 has width 1, got 2");
}

// A host's block that counts how often its weights are asked for, which costs a device's a copy.
class CountingBlock final : public BlockStore {
 public:
  CountingBlock(std::unique_ptr<BlockStore> block, std::atomic<int>& asked)
      : block_(std::move(block)), asked_(asked) {}
  std::span<const float> weights() const override {
    ++asked_;
    return block_->weights();
  }
  std::span<const float> state() const override { return block_->state(); }
  void set_weights(std::span<const float> weights) override { block_->set_weights(weights); }
  void set_state(std::span<const float> state) override { block_->set_state(state); }
  void update(int64_t step, std::span<const float> gradient) override {
    block_->update(step, gradient);
  }

 private:
  const std::unique_ptr<BlockStore> block_;
  std::atomic<int>& asked_;
};

TEST(ServerTest, APushAsksForNoWeightsOfABlock) {
  std::atomic<int> asked{0};
  Cluster cluster(1, {.make_block = [&](const RuleOptions& rule, int64_t elements) {
                    return std::make_unique<CountingBlock>(make_host_block(rule, elements), asked);
                  }});
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.blocks = {{"net", 0, 4, 0}};
  const auto client = cluster.client(0, job);
  const std::vector<float> zeros(4), gradient(4, -1);
  const std::array<std::span<const float>, 1> initial{zeros};
  client->initialise(initial);
  asked = 0;
  for (int step = 0; step < 3; ++step) client->push({}, {gradient});
  client->flush();
  EXPECT_EQ(asked, 0);
  std::vector<float> weights(4);
  client->pull({}, {weights}).wait();
  EXPECT_EQ(weights, std::vector<float>(4, 3));
}

TEST(ServerTest, PredictionsMakeNoRow) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].initializer = {.kind = Initializer::Kind::kUniform, .scale = 1};
  const auto trainer = cluster.client(0, job);
  const auto reader = cluster.client(kNoTrainer, job);
  std::vector<uint64_t> ids{1, 2, 3};
  std::vector<float> rows(6, 9);
  const PullRows asked{0, ids, rows};
  reader->pull(std::span(&asked, 1), {}, /*is_prediction=*/true).wait();
  EXPECT_EQ(rows, std::vector<float>(6, 0));
  trainer->pull(std::span(&asked, 1), {}).wait();
  EXPECT_NE(rows, std::vector<float>(6, 0)) << "its first push begins with these";
  EXPECT_EQ(status_of(cluster)["tables"][0]["rows"], 0);
}

TEST(ServerTest, AServerThatStopsAnswersWhatWaits) {
  const std::vector<Code> codes = in_less_than_a_second([] {
    Cluster cluster(1);
    const JobOptions job = ledger_job(2, 1, Mode::kSync);
    RawTrainer first(cluster, job, 0);
    RawTrainer second(cluster, job, 1);
    cluster.ask(0, first.push(1));
    std::vector<std::future<Reply>> answers;
    answers.push_back(cluster.send(0, first.pull({1}, 1)));
    answers.push_back(cluster.send(0, first.push(9)));
    const auto server = cluster.slot(0).get();  // It lives on: its end must not be what answers.
    EXPECT_EQ(cluster.ask(0, {.call = Call::kStop}).code, Code::kOk);
    server->wait();
    std::vector<Code> given;
    for (auto& answer : answers) {
      const bool is_there = answer.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
      EXPECT_TRUE(is_there);
      if (is_there) given.push_back(answer.get().code);
    }
    return given;
  });
  EXPECT_EQ(codes, (std::vector<Code>{Code::kLost, Code::kLost}));
}

TEST(ServerTest, AServerThatComesBackAndGoesAgainIsGivenUpInTime) {
  Cluster cluster(1);
  LinkOptions link = quick_link();
  link.server_timeout = milliseconds(3'000);
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync), link);
  std::vector<uint64_t> ids{1};
  std::vector<float> row(2, -1);
  const PushRows pushed{0, ids, row};
  client->push(std::span(&pushed, 1), {});
  client->flush();
  // It is there for no longer than it takes to say that it is another one.
  cluster.restart(0);
  std::atomic<bool> over{false};
  std::thread ender([&] {
    const auto has_refused = [&] {  // Or has ended.
      const Reply status = cluster.ask(0, {.call = Call::kStatus});
      return status.code != Code::kOk || json::parse(status.text)["refused"] > 0;
    };
    while (!over && !has_refused()) std::this_thread::yield();
    cluster.end(0);
  });
  const auto began = steady_clock::now();
  const std::string text = message_of<c10::DistError>([&] {
    client->push(std::span(&pushed, 1), {});
    client->flush();
    cluster.end(0);  // Had it joined again before its end: the next one must fail.
    client->push(std::span(&pushed, 1), {});
    client->flush();
  });
  EXPECT_EQ(text.find("server 0 (in-process:0): no reply for "), 0U) << text;
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(20));
  over = true;
  ender.join();
}

TEST(ServerTest, PredictionsWaitForNoSlowerTrainer) {
  Cluster cluster(1);
  JobOptions job = ledger_job(2, 1, Mode::kAsync);
  job.max_staleness = 1;
  RawTrainer fast(cluster, job, 0);
  RawTrainer slow(cluster, job, 1);
  for (uint64_t sequence = 1; sequence <= 3; ++sequence)
    ASSERT_EQ(cluster.ask(0, fast.push(sequence)).code, Code::kOk);
  EXPECT_EQ(cluster.ask(0, fast.pull({1})).code, Code::kNotYet);
  EXPECT_EQ(cluster.ask(0, fast.pull({1}, 0, kPrediction)).code, Code::kOk);
}

TEST(ServerTest, ServersGivenInAnotherOrderAreNamed) {
  Cluster cluster(2);
  const JobOptions job = ledger_job(1, 2, Mode::kAsync);
  const Client::ChannelMaker exchanged = [&](int server) { return cluster.channel(1 - server); };
  EXPECT_EQ(message_of<c10::ValueError>([&] {
              Client({.servers = {"b", "a"}, .link = quick_link()}, job, exchanged);
            }),
            "client: b is given as server 0 and is server 1: expected endpoints in the order of "
            "the servers' numbers");
  for (const int server : {0, 1}) {
    const json status = status_of(cluster, server);
    EXPECT_FALSE(status.contains("mode")) << "no job";
    EXPECT_TRUE(status["trainers"].empty());
  }
  const auto client = cluster.client(0, ledger_job(1, 2, Mode::kSync));
}

}  // namespace server_test
}  // namespace cohort::ps
