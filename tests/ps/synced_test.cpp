// Acknowledge::kSynced: what was answered, the disk has. The disk is watched through fdatasync,
// which this file replaces for all of the program.
#include <filesystem>
#include <future>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "tests/ps/cluster.h"

namespace cohort::ps {
namespace {

namespace fs = std::filesystem;

// How long each file was when it was synced last.
class SyncedSizes {
 public:
  static SyncedSizes& instance() {
    static SyncedSizes sizes;
    return sizes;
  }

  void note(int file) {
    struct stat status {};
    if (::fstat(file, &status) != 0) return;
    const std::lock_guard lock(mutex_);
    sizes_[{status.st_dev, status.st_ino}] = status.st_size;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    sizes_.clear();
  }
  int64_t unsynced_bytes(const std::string& folder) {
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder)) {
      struct stat status {};
      if (::stat(entry.path().c_str(), &status) != 0) continue;
      const std::lock_guard lock(mutex_);
      bytes += status.st_size - sizes_[{status.st_dev, status.st_ino}];
    }
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<dev_t, ino_t>, int64_t> sizes_;
};

}  // namespace
}  // namespace cohort::ps

extern "C" int fdatasync(int file) {
  cohort::ps::SyncedSizes::instance().note(file);
  return static_cast<int>(::syscall(SYS_fdatasync, file));
}

namespace cohort::ps {
namespace {

// Of the log, when `request` was answered; -1 if it was refused.
int64_t unsynced_at_the_answer(Cluster& cluster, const Request& request) {
  auto promise = std::make_shared<std::promise<int64_t>>();
  const std::string log = cluster.folder(0) + "/log";
  cluster.slot(0).get()->submit(request, [promise, log](const Reply& reply) {
    promise->set_value(reply.code == Code::kOk ? SyncedSizes::instance().unsynced_bytes(log) : -1);
  });
  auto bytes = promise->get_future();
  return bytes.wait_for(std::chrono::seconds(60)) == std::future_status::ready ? bytes.get() : -1;
}

TEST(SyncedTest, WhateverIsAnsweredIsOnTheDisk) {
  Cluster cluster(1, {.acknowledge = Acknowledge::kSynced});
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
  cluster.options(0).acknowledge = Acknowledge::kSynced;
  SyncedSizes::instance().forget();
  cluster.start(0);
  trainer.header.server_incarnation = 2;
  EXPECT_EQ(unsynced_at_the_answer(cluster, trainer.push(1)), 0);
}

}  // namespace
}  // namespace cohort::ps
