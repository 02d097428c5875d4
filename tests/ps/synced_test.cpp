// SPDX-License-Identifier: Apache-2.0
// Durability::kSynced: acknowledged pushes are on the disk.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>

#include "tests/ps/cluster.h"
#include "tests/ps/disk_calls.h"

namespace cohort::ps {
namespace synced_test {

namespace fs = std::filesystem;

int64_t unsynced_bytes(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder))
    bytes += static_cast<int64_t>(entry.file_size()) -
             std::max<int64_t>(disk_calls::synced_bytes(entry.path().string()), 0);
  return bytes;
}

// Of the log, when `request` was answered; -1 if it was refused.
int64_t unsynced_at_the_answer(Cluster& cluster, const Request& request) {
  auto promise = std::make_shared<std::promise<int64_t>>();
  const std::string log = cluster.folder(0) + "/log";
  cluster.slot(0).get()->submit(request, [promise, log](const Reply& reply) {
    promise->set_value(reply.code == Code::kOk ? unsynced_bytes(log) : -1);
  });
  auto bytes = promise->get_future();
  return bytes.wait_for(std::chrono::seconds(60)) == std::future_status::ready ? bytes.get() : -1;
}

TEST(SyncedTest, WhateverIsAnsweredIsOnTheDisk) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  const Request set_job{.call = Call::kJob, .trainer = 0, .text = job.to_json()};
  EXPECT_EQ(unsynced_at_the_answer(cluster, set_job), 0);
  const Request join{.call = Call::kJoin, .trainer = 0, .job = job.fingerprint(), .nonce = 7};
  EXPECT_EQ(unsynced_at_the_answer(cluster, join), 0);
  const RawTrainer trainer(cluster, job, 0, 7);
  EXPECT_EQ(unsynced_at_the_answer(cluster, trainer.push(1)), 0);
  EXPECT_EQ(unsynced_at_the_answer(cluster, {.call = Call::kLeave,
                                             .trainer = 0,
                                             .incarnation = trainer.joined.trainer_incarnation}),
            0);
}

// Its first answer may be lost with the server that had only logged it.
TEST(SyncedTest, APushOfAnEarlierStartIsOnTheDiskBeforeItIsAcknowledgedAgain) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  ASSERT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
  cluster.end(0);
  cluster.options(0).durability = Durability::kSynced;
  disk_calls::forget();
  cluster.start(0);
  trainer.header.server_incarnation = 2;
  EXPECT_EQ(unsynced_at_the_answer(cluster, trainer.push(1)), 0);
}

// Which comes once a second, and lets go of the pages that it has synced.
TEST(SyncedTest, APushDoesNotWaitForThePeriodicSync) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  constexpr int kPushes = 5;
  for (int i = 1; i <= kPushes; ++i)
    ASSERT_EQ(cluster.ask(0, trainer.push(static_cast<uint64_t>(i))).code, Code::kOk);
  const std::string segment = fs::directory_iterator(cluster.folder(0) + "/log")->path().string();
  EXPECT_GE(disk_calls::count(disk_calls::Call::kFdatasync, segment), kPushes);
  EXPECT_LE(disk_calls::count(disk_calls::Call::kDropPages, segment), 2);
}

// A disk that takes its time: pushes wait for it, and nothing else does.
TEST(SyncedTest, APullDoesNotWaitForTheDisk) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const disk_calls::ReplacedSyncs slow(3'000'000);
  auto pushed = cluster.send(0, trainer.push(1));
  const Reply reply = cluster.ask(0, trainer.pull({1}));
  EXPECT_EQ(pushed.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_EQ(reply.code, Code::kOk);
  EXPECT_EQ(parse_message(reply.message.span()).sections[0].values[0], 1.0f);
  EXPECT_EQ(pushed.get().code, Code::kOk);
}

// Others might have computed with it, and the server go back behind it.
TEST(SyncedTest, AStepIsShownWhenItIsOnTheDisk) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kSync), 0);
  const disk_calls::ReplacedSyncs slow(300'000);
  auto pushed = cluster.send(0, trainer.push(1));
  EXPECT_EQ(unsynced_at_the_answer(cluster, trainer.pull({1}, 1)), 0);
  EXPECT_EQ(pushed.get().code, Code::kOk);
}

TEST(SyncedTest, ACheckpointBeginsWhenItsStepIsOnTheDisk) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kSync), 0);
  const std::string folder = cluster.path("checkpoint");
  const Request save{.call = Call::kSave, .trainer = 0, .step = 1, .nonce = 7, .text = folder};
  std::optional<disk_calls::ReplacedSyncs> slow(300'000);
  auto pushed = cluster.send(0, trainer.push(1));
  auto saved = cluster.send(0, save);
  while (!fs::exists(folder) &&
         saved.wait_for(std::chrono::milliseconds(1)) == std::future_status::timeout) {
  }
  EXPECT_TRUE(fs::exists(folder));
  EXPECT_EQ(pushed.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  slow.reset();
  Reply reply = saved.get();
  for (int i = 0; i < 60 && reply.code == Code::kNotYet; ++i) reply = cluster.ask(0, save);
  EXPECT_EQ(reply.code, Code::kOk) << reply.text;
}

// It appends nothing itself, but closes the step. Servers that are two steps apart after a power
// failure could not continue.
TEST(SyncedTest, AConfirmationIsAnsweredWhenTheStepThatItClosesIsOnTheDisk) {
  Cluster cluster(2, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 2, Mode::kSync), 0);
  ASSERT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
  const disk_calls::ReplacedSyncs slow(300'000);
  EXPECT_EQ(unsynced_at_the_answer(cluster, trainer.confirm(1)), 0);
}

TEST(SyncedTest, APullThatWaitsForTheDiskIsToldSo) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kSync), 0);
  const disk_calls::ReplacedSyncs slow(3'000'000);
  auto pushed = cluster.send(0, trainer.push(1));
  const Reply reply = cluster.ask(0, trainer.pull({1}, 1));
  EXPECT_EQ(reply.code, Code::kNotYet);
  EXPECT_EQ(reply.text, "step 1 is not on the disk yet");
  EXPECT_EQ(pushed.get().code, Code::kOk);
}

// A stopped server has answered what it had taken.
TEST(SyncedTest, PushesBeforeAStopAreAcknowledged) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const disk_calls::ReplacedSyncs slow(300'000);
  auto pushed = cluster.send(0, trainer.push(1));
  EXPECT_EQ(cluster.ask(0, {.call = Call::kStop}).code, Code::kOk);
  EXPECT_EQ(pushed.get().code, Code::kOk);
}

// As by a signal.
TEST(SyncedTest, PushesThatWereAppliedBeforeTheEndAreAcknowledged) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const disk_calls::ReplacedSyncs slow(300'000);
  auto pushed = cluster.send(0, trainer.push(1));
  EXPECT_EQ(trainer.weight(1), 1.0f);
  cluster.end(0);
  EXPECT_EQ(pushed.get().code, Code::kOk);
}

}  // namespace synced_test
}  // namespace cohort::ps
