// SPDX-License-Identifier: Apache-2.0
// What a server makes of a disk that fails, and what it has given to the disk before it relies on
// it.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <memory>
#include <span>
#include <string>
#include <sys/stat.h>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/ps/server/update_log.h"
#include "cohort/ps/server/write_behind.h"

#include "tests/ps/cluster.h"
#include "tests/ps/disk_calls.h"
#include "tests/ps/file_size_limit.h"
#include "tests/ps/scratch_folder.h"
#include "tests/support/eventually.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace disk_failure_test {

namespace fs = std::filesystem;
using cohort::test::eventually;
using cohort::test::message_of;
using disk_calls::Call;

uint64_t append(UpdateLog& log, size_t bytes = 100) {
  const std::vector<std::byte> payload(bytes);
  return log.begin_append({.kind = RecordKind::kEvict, .payload = payload});
}

// That of a server which does not end by itself is that there is none.
std::string error_at_the_end_of(Server& server) {
  auto ended = std::async(std::launch::async,
                          [&] { return message_of<c10::Error>([&] { server.wait(); }); });
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  server.stop();
  return ended.get();
}

class DiskFailureTest : public testing::Test {
 protected:
  DiskFailureTest() { disk_calls::forget(); }

  const ScratchFolder folder_;
};

// The system says it once, and holds what was not written for clean from then on.
TEST_F(DiskFailureTest, ALogThatCouldNotBeSyncedOnceIsNeverBelievedAgain) {
  for (const Call call : {Call::kFdatasync, Call::kFsync}) {
    const std::string path = folder_.path(std::to_string(static_cast<int>(call)));
    UpdateLog log(path, 1, [](const Record&) {});
    append(log);
    disk_calls::fail_next(call, EIO);
    const std::string text = message_of<c10::Error>([&] {
      if (call == Call::kFdatasync) {
        log.sync();
      } else {
        log.begin_segment();  // The folder is to have its name.
      }
    });
    EXPECT_EQ(text.find(path), 0U) << text;
    EXPECT_NE(text.find("cannot sync: Input/output error"), std::string::npos) << text;
    EXPECT_EQ(message_of<c10::Error>([&] { log.sync(); }), text);
    EXPECT_EQ(message_of<c10::Error>([&] { append(log); }), text);
    EXPECT_EQ(message_of<c10::Error>([&] { log.begin_segment(); }), text);
  }
}

// A snapshot begins with a sync of the log, which no request waits for.
TEST_F(DiskFailureTest, AServerWhoseLogCannotBeSyncedEndsByName) {
  constexpr int64_t kLogBytes = 1 << 20;
  Cluster cluster(1, {.snapshot_log_bytes = kLogBytes});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  ASSERT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
  std::vector<uint64_t> ids(kLogBytes / 16);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const Request large = trainer.push(2, ids);
  disk_calls::fail_next(Call::kFdatasync, EIO);
  const Code code = cluster.ask(0, large).code;
  ASSERT_TRUE(code == Code::kOk || code == Code::kLost) << "the log syncs each second, too";
  const std::string text = error_at_the_end_of(*cluster.slot(0).get());
  EXPECT_NE(text.find("cannot sync: Input/output error"), std::string::npos) << text;
  EXPECT_EQ(cluster.ask(0, trainer.push(3)).code, Code::kLost);
}

TEST_F(DiskFailureTest, WhatCouldNotBeWrittenStaysInMemory) {
  const std::string path = folder_.path("file");
  std::ofstream(path) << std::string(300, 'x');
  {
    WriteBehind write_behind(100);
    write_behind.begin(path, 0);
    write_behind.grown_to(100, 1);
    ASSERT_TRUE(eventually([&] { return disk_calls::count(Call::kDropPages, path) == 1; }));
    EXPECT_EQ(write_behind.error(), 0);
    EXPECT_EQ(write_behind.synced(), 1U);
    disk_calls::fail_next(Call::kFdatasync, EIO);
    write_behind.grown_to(200, 2);
    write_behind.grown_to(300, 3);  // Nor is it let go with what comes later.
    ASSERT_TRUE(eventually([&] { return write_behind.error() != 0; }));
    EXPECT_EQ(write_behind.error(), EIO);
  }
  EXPECT_EQ(disk_calls::count(Call::kDropPages, path), 1);
}

// Where such a file cannot be synced nothing has failed.
TEST_F(DiskFailureTest, AFileThatCannotBeSyncedIsLeftToTheSystem) {
  const std::string path = folder_.path("file");
  std::ofstream(path) << std::string(200, 'x');
  WriteBehind write_behind(100);
  write_behind.begin(path, 0);
  disk_calls::fail_next(Call::kFdatasync, EINVAL);
  int64_t bytes = 0;
  ASSERT_TRUE(eventually([&] {
    write_behind.grown_to(bytes += 100, 1);
    return disk_calls::count(Call::kDropPages, path) > 0;
  }));
  EXPECT_EQ(write_behind.error(), 0);
}

// A file of 100 bytes, whose sync can be asked for.
struct AskedSync {
  explicit AskedSync(const std::string& path) {
    std::ofstream(path) << std::string(100, 'x');
    write_behind.begin(path, 0);
  }

  // Of the whole file, which ends with record `number`; returns whether it has ended.
  bool ends(uint64_t number) {
    write_behind.grown_to(100, number);
    write_behind.sync_soon();
    return ended.get_future().wait_for(std::chrono::seconds(30)) == std::future_status::ready;
  }

  std::promise<void> ended;
  WriteBehind write_behind{1000, [this] { ended.set_value(); }};
};

// Somebody waits for it.
TEST_F(DiskFailureTest, ASyncThatWasAskedForFailsForWhateverReason) {
  for (const int error : {EINVAL, EIO}) {
    AskedSync sync(folder_.path("file"));
    disk_calls::fail_next(Call::kFdatasync, error);
    ASSERT_TRUE(sync.ends(1));
    EXPECT_EQ(sync.write_behind.error(), error);
    EXPECT_EQ(sync.write_behind.synced(), 0U);
  }
}

// A snapshot may remove it while its last sync waits.
TEST_F(DiskFailureTest, AFileThatHasLostItsNameIsSynced) {
  const std::string path = folder_.path("file");
  AskedSync sync(path);
  fs::remove(path);
  ASSERT_TRUE(sync.ends(7));
  EXPECT_EQ(sync.write_behind.error(), 0);
  EXPECT_EQ(sync.write_behind.synced(), 7U);
}

TEST_F(DiskFailureTest, ASyncThatWasAskedForKeepsThePages) {
  const std::string path = folder_.path("file");
  AskedSync sync(path);
  ASSERT_TRUE(sync.ends(7));
  EXPECT_EQ(sync.write_behind.synced(), 7U);
  EXPECT_EQ(disk_calls::count(Call::kFdatasync, path), 1);
  EXPECT_EQ(disk_calls::count(Call::kDropPages, path), 0);
}

TEST_F(DiskFailureTest, AServerThatCannotSyncAPushEndsByName) {
  Cluster cluster(1, {.durability = Durability::kSynced});
  const RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  disk_calls::fail_next(Call::kFdatasync, EIO);
  EXPECT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kLost);
  const std::string text = error_at_the_end_of(*cluster.slot(0).get());
  EXPECT_NE(text.find("cannot sync: Input/output error"), std::string::npos) << text;
}

TEST_F(DiskFailureTest, ALogWhoseBytesDidNotReachTheDiskTakesNoMore) {
  UpdateLog log(folder_.path("log"), 1, [](const Record&) {});
  disk_calls::fail_next(Call::kFdatasync, EIO);
  std::string text;
  ASSERT_TRUE(eventually([&] {
    text = message_of<c10::Error>([&] { append(log, size_t{4} << 20); });
    return text != "nothing was thrown";
  }));
  EXPECT_EQ(text.find(folder_.path("log")), 0U) << text;
  EXPECT_NE(text.find("cannot sync: Input/output error"), std::string::npos) << text;
  EXPECT_EQ(message_of<c10::Error>([&] { append(log); }), text);
  EXPECT_EQ(message_of<c10::Error>([&] { log.sync(); }), text);
}

// A log whose records are large enough to be written beside the caller.
class BesideTest : public DiskFailureTest {
 protected:
  BesideTest() { disk_calls::set_file_system(EXT4_SUPER_MAGIC); }
  ~BesideTest() override { disk_calls::set_file_system(0); }

  static std::shared_ptr<const Buffer> message_filled(std::byte value) {
    Buffer buffer(kBytes);
    std::fill(buffer.span().begin(), buffer.span().end(), value);
    return std::make_shared<const Buffer>(std::move(buffer));
  }
  // The value is that of the record's number.
  static uint64_t begin(UpdateLog& log) {
    const auto message = message_filled(static_cast<std::byte>(log.next_number()));
    return log.begin_append({.time = 5, .payload = message->span(), .message = message},
                            /*beside=*/true);
  }
  static void append_large(UpdateLog& log) {
    begin(log);
    log.finish_append();
  }
  std::unique_ptr<UpdateLog> open(const std::function<void(const Record&)>& visit = {}) const {
    return std::make_unique<UpdateLog>(
        folder_.path("log"), 1, visit ? visit : [](const Record&) {});
  }
  std::string segment() const {
    return fs::directory_iterator(folder_.path("log"))->path().string();
  }
  int64_t length() const { return static_cast<int64_t>(fs::file_size(segment())); }
  static int64_t bytes_on_disk(const std::string& path) {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 ? int64_t{512} * status.st_blocks : -1;
  }
  // How many records the log has; each must be whole.
  uint64_t records() const {
    uint64_t count = 0;
    open([&](const Record& record) {
      EXPECT_EQ(record.number, ++count);
      EXPECT_EQ(record.payload.size(), kBytes);
      const auto value = static_cast<std::byte>(record.number);
      EXPECT_EQ(std::count(record.payload.begin(), record.payload.end(), value),
                static_cast<std::ptrdiff_t>(kBytes));
    });
    return count;
  }

  static constexpr size_t kBytes = size_t{1} << 20;
  static constexpr int64_t kRecordBytes = 40 + kBytes;
};

TEST_F(BesideTest, ALargeRecordIsWrittenWithoutItsCallerWhereSpaceIsReserved) {
  const auto log = open();
  begin(*log);
  EXPECT_EQ(length(), kRecordBytes) << "nothing was reserved for the first";
  log->finish_append();
  EXPECT_EQ(begin(*log), 2U);
  ASSERT_TRUE(eventually([&] { return length() == 2 * kRecordBytes; }));
  log->finish_append();
  EXPECT_EQ(log->next_number(), 3U);
  for (int i = 2; i < 100; ++i) append_large(*log);
  append(*log, kBytes - 1);  // It has no message.
  EXPECT_EQ(length(), 101 * kRecordBytes);
  EXPECT_EQ(disk_calls::count(Call::kReserve, segment()), 4) << "at 1, 34, 67 and 100 MiB";
}

TEST_F(BesideTest, WhatWasWrittenBesideIsReadAsItWas) {
  {
    const auto log = open();
    for (int i = 0; i < 150; ++i) append_large(*log);
  }
  EXPECT_EQ(records(), 150U);
}

// Neither its length nor, in the end, its space.
TEST_F(BesideTest, ReservedSpaceIsNoneOfTheFiles) {
  const int64_t small = 2 * kRecordBytes + (int64_t{1} << 20);
  {
    const auto log = open();
    append_large(*log);
    append_large(*log);
    const std::string first = segment();
    EXPECT_GT(bytes_on_disk(first), UpdateLog::kReservedBytes / 2);
    EXPECT_EQ(length(), 2 * kRecordBytes);
    log->begin_segment();
    EXPECT_LT(bytes_on_disk(first), small);
    log->remove_before(3);
    append_large(*log);
    EXPECT_GT(bytes_on_disk(segment()), UpdateLog::kReservedBytes / 2);
  }
  EXPECT_LT(bytes_on_disk(segment()), small);
}

TEST_F(BesideTest, SpaceThatAKilledServerHadReservedIsGivenBack) {
  append_large(*open());
  {
    const Fd file(::open(segment().c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(::fallocate(file.get(), FALLOC_FL_KEEP_SIZE, 0, UpdateLog::kReservedBytes), 0);
  }
  ASSERT_GT(bytes_on_disk(segment()), UpdateLog::kReservedBytes / 2);
  const auto log = open();
  EXPECT_LT(bytes_on_disk(segment()), 2 << 20);
}

// Then a record is written before anything is applied: as on a full disk.
TEST_F(BesideTest, WhereNoSpaceCanBeReservedARecordIsThereWhenItHasBegun) {
  const auto expect_at_once = [&](UpdateLog& log) {
    const int64_t before = length();
    begin(log);
    EXPECT_EQ(length(), before + kRecordBytes);
    log.finish_append();
  };
  for (const int error : {ENOSPC, EDQUOT, EOPNOTSUPP}) {
    fs::remove_all(folder_.path("log"));
    const auto log = open();
    disk_calls::fail_next(Call::kReserve, error);
    for (int i = 0; i < 20; ++i) expect_at_once(*log);
    EXPECT_EQ(disk_calls::count(Call::kReserve, segment()), 0) << "it is not tried each time";
    EXPECT_LT(bytes_on_disk(segment()), 21 * kRecordBytes);
  }
  fs::remove_all(folder_.path("log"));
  disk_calls::set_file_system(NFS_SUPER_MAGIC);
  const auto log = open();
  for (int i = 0; i < 3; ++i) expect_at_once(*log);
}

TEST_F(BesideTest, AFileThatMayNotGrowIsNotedBeforeTheRecordIsApplied) {
  const auto log = open();
  append_large(*log);
  append_large(*log);
  {
    const FileSizeLimit full(3 * kRecordBytes - 1);
    EXPECT_EQ(message_of<c10::Error>([&] { begin(*log); }),
              segment() +
                  ": cannot write: File too large: expected a limit of file sizes (ulimit -f) of "
                  "at least " +
                  std::to_string(3 * kRecordBytes) + " bytes, got " +
                  std::to_string(3 * kRecordBytes - 1) +
                  "; raise it with prlimit, or start the server again without it");
    EXPECT_EQ(length(), 2 * kRecordBytes);
    EXPECT_FALSE(log->is_broken());
  }
  const int reservations = disk_calls::count(Call::kReserve, segment());
  append_large(*log);
  EXPECT_EQ(disk_calls::count(Call::kReserve, segment()), reservations + 1)
      << "what was reserved went when half a record was cut off";
  append_large(*log);
  EXPECT_EQ(log->next_number(), 5U);
}

// What was reserved before goes with it, so the log must not count on that.
TEST_F(BesideTest, WhenNoMoreCanBeReservedRecordsAreThereWhenTheyHaveBegun) {
  const auto log = open();
  while (length() < UpdateLog::kReservedBytes / 4) append_large(*log);
  ASSERT_GT(bytes_on_disk(segment()), UpdateLog::kReservedBytes / 2);
  disk_calls::fail_next(Call::kReserve, ENOSPC);
  while (length() < UpdateLog::kReservedBytes * 5 / 8) append_large(*log);
  EXPECT_LT(bytes_on_disk(segment()), UpdateLog::kReservedBytes * 3 / 4) << "all was given back";
  for (int i = 0; i < 3; ++i) {
    const int64_t before = length();
    begin(*log);
    EXPECT_EQ(length(), before + kRecordBytes) << "written before it is applied";
    log->finish_append();
  }
}

TEST_F(BesideTest, ALogThatCouldNotBeWrittenBesideTakesNoMore) {
  {
    const auto log = open();
    append_large(*log);
    append_large(*log);
    disk_calls::fail_next(Call::kWriteLarge, EIO);
    begin(*log);
    const std::string text = message_of<c10::Error>([&] { log->finish_append(); });
    EXPECT_EQ(text, segment() +
                        ": cannot write to reserved space: Input/output error: look after the "
                        "disk, then start the server again");
    EXPECT_TRUE(log->is_broken());
    EXPECT_EQ(message_of<c10::Error>([&] { begin(*log); }), text);
    EXPECT_EQ(message_of<c10::Error>([&] { log->sync(); }), text);
  }
  EXPECT_EQ(records(), 2U);
}

// It is applied by then; nobody sees that.
TEST_F(BesideTest, AServerThatCannotWriteAPushThatItAppliedEndsByName) {
  Cluster cluster(1);
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  std::vector<uint64_t> ids(10'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  for (const uint64_t number : {1, 2})
    ASSERT_EQ(cluster.ask(0, trainer.push(number, ids)).code, Code::kOk);
  EXPECT_EQ(trainer.weight(7), 2.0f);
  disk_calls::fail_next(Call::kWriteLarge, EIO);
  auto pushed = cluster.send(0, trainer.push(3, ids));
  auto pulled = cluster.send(0, trainer.pull({7}));
  EXPECT_EQ(pushed.get().code, Code::kLost);
  EXPECT_EQ(pulled.get().code, Code::kLost);
  const std::string text = error_at_the_end_of(*cluster.slot(0).get());
  EXPECT_NE(text.find("cannot write to reserved space: Input/output error"), std::string::npos)
      << text;
  cluster.restart(0);
  trainer.header.server_incarnation = 2;
  EXPECT_EQ(trainer.weight(7), 2.0f);
  EXPECT_EQ(cluster.ask(0, trainer.push(3, ids)).code, Code::kOk);
  EXPECT_EQ(trainer.weight(7), 3.0f);
}

// After the end of such a server: in memory there may be what the disk has not got.
TEST_F(DiskFailureTest, ALogIsReadAsTheDiskHasIt) {
  {
    append(*std::make_unique<UpdateLog>(folder_.path("log"), 1, [](const Record&) {}));
  }
  const std::string segment = fs::directory_iterator(folder_.path("log"))->path().string();
  ASSERT_EQ(disk_calls::count(Call::kDropPages, segment), 0);
  int records = 0;
  const UpdateLog log(folder_.path("log"), 1, [&](const Record&) {
    EXPECT_EQ(disk_calls::count(Call::kDropPages, segment), 1);
    ++records;
  });
  EXPECT_EQ(records, 1);
}

// Files that the disk has not got whole.
std::vector<std::string> unsynced_in(const fs::path& folder) {
  std::vector<std::string> unsynced;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const bool is_file = entry.is_regular_file();
    const auto bytes = is_file ? static_cast<int64_t>(entry.file_size()) : int64_t{0};
    if (disk_calls::synced_bytes(entry.path().string()) < bytes)
      unsynced.push_back(entry.path().string());
  }
  if (disk_calls::synced_bytes(folder.string()) < 0) unsynced.push_back(folder.string());
  if (disk_calls::synced_bytes(folder.parent_path().string()) < 0)
    unsynced.push_back(folder.parent_path().string());
  return unsynced;
}

JobOptions job_with_a_block() {
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.blocks = {{.parameter = "p", .begin = 0, .end = 100, .server = 0}};
  return job;
}

fs::path snapshot_in(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const fs::path name = entry.path().filename();
    if (name.string().starts_with("snapshot.") && name.extension() != ".unfinished")
      return entry.path();
  }
  return {};
}

// What it replaces, the log before it, is removed then.
TEST_F(DiskFailureTest, ASnapshotIsOnTheDiskWhenItHasItsName) {
  const disk_calls::ReplacedSyncs syncs(0);
  Cluster cluster(1, {.snapshot_log_bytes = 1});
  const auto client = cluster.client(0, job_with_a_block());
  const std::vector<float> initial(100, 1);
  const std::span<const float> values(initial);
  client->initialise(std::span(&values, 1));
  const std::vector<uint64_t> ids{1, 2, 3};
  const std::vector<float> gradients(6, -1);
  const PushRows pushed{0, ids, gradients};
  client->push(std::span(&pushed, 1), {});
  client->flush();
  ASSERT_TRUE(eventually([&] { return !snapshot_in(cluster.folder(0)).empty(); }));
  cluster.end(0);
  const fs::path snapshot = snapshot_in(cluster.folder(0));
  ASSERT_FALSE(snapshot.empty());
  ASSERT_FALSE(fs::is_empty(snapshot));
  EXPECT_EQ(unsynced_in(snapshot), std::vector<std::string>());
}

TEST_F(DiskFailureTest, ACheckpointIsOnTheDiskWhenItIsSaved) {
  Cluster cluster(1);
  const auto client = cluster.client(0, job_with_a_block());
  const std::vector<float> initial(100, 1);
  const std::span<const float> values(initial);
  client->initialise(std::span(&values, 1));
  client->save(cluster.path("checkpoint"));
  size_t parts = 0;
  for (const auto& save : fs::directory_iterator(cluster.path("checkpoint"))) {
    if (!save.is_directory()) continue;
    for (const auto& part : fs::directory_iterator(save)) {
      EXPECT_EQ(unsynced_in(part), std::vector<std::string>());
      ++parts;
    }
  }
  EXPECT_EQ(parts, 1U);
}

}  // namespace disk_failure_test
}  // namespace cohort::ps
