// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/update_log.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/crc32c.h"

#include "tests/ps/file_size_limit.h"
#include "tests/ps/scratch_folder.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace update_log_test {

namespace fs = std::filesystem;
using cohort::test::message_of;

// A record as it was read.
struct Copy {
  uint64_t number = 0;
  RecordKind kind = RecordKind::kPush;
  uint32_t time = 0;
  std::string payload;
  bool operator==(const Copy&) const = default;
};

std::vector<Copy> records_of(const std::string& folder, uint64_t from = 1) {
  std::vector<Copy> records;
  const UpdateLog log(folder, from, [&](const Record& record) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(record.payload.data()) % 8, 0U);
    records.push_back(
        {record.number,
         record.kind,
         record.time,
         {reinterpret_cast<const char*>(record.payload.data()), record.payload.size()}});
  });
  return records;
}

void append(UpdateLog& log, const std::string& payload, uint32_t time = 5) {
  log.begin_append({.time = time, .payload = std::as_bytes(std::span(payload))});
}

// Payloads of all lengths of padding, none, and one larger than the others.
std::string payload_of(uint64_t number) {
  return std::string(number % 11 == 0 ? 100 : number % 11, static_cast<char>('a' + number % 26));
}

constexpr size_t kLongRecord = 40 + 100 + 4;  // Header, payload, padding.

std::vector<Copy> write_log(const std::string& folder, uint64_t first, uint64_t last) {
  std::vector<Copy> expected;
  UpdateLog log(folder, 1, [](const Record&) {});
  for (uint64_t number = first; number <= last; ++number) {
    append(log, payload_of(number), static_cast<uint32_t>(number));
    expected.push_back(
        {number, RecordKind::kPush, static_cast<uint32_t>(number), payload_of(number)});
  }
  return expected;
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::vector<fs::path> segments_in(const std::string& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST(UpdateLogTest, WhatWasAppendedIsReplayedAndGoesOn) {
  const ScratchFolder folder;
  auto expected = write_log(folder.path("log"), 1, 40);
  EXPECT_EQ(records_of(folder.path("log")), expected);
  const auto more = write_log(folder.path("log"), 41, 50);
  expected.insert(expected.end(), more.begin(), more.end());
  EXPECT_EQ(records_of(folder.path("log")), expected);
  EXPECT_EQ(records_of(folder.path("log"), 45).size(), 6U);
}

TEST(UpdateLogTest, AChecksumThatIsKnownIsWrittenAsItIs) {
  const ScratchFolder folder;
  const std::string payload = "payload";
  const auto bytes = std::as_bytes(std::span(payload));
  for (const uint32_t wrong : {0U, 1U}) {
    const std::string path = folder.path(std::to_string(wrong));
    UpdateLog(path, 1, [](const Record&) {
    }).begin_append({.time = 5, .payload = bytes, .checksum = crc32c(bytes) + wrong});
    const std::string text = message_of<ConfigError>([&] {
      EXPECT_EQ(records_of(path), std::vector<Copy>({{1, RecordKind::kPush, 5, payload}}));
    });
    EXPECT_EQ(text.find("the checksum of record 1 does not fit") != std::string::npos, wrong != 0)
        << text;
  }
}

TEST(UpdateLogTest, AFileCutAnywhereInItsLastRecordHoldsTheOthers) {
  const ScratchFolder folder;
  auto expected = write_log(folder.path("log"), 1, 11);
  const fs::path path = segments_in(folder.path("log")).front();
  const std::string whole = bytes_of(path);
  expected.pop_back();
  const size_t last_begins = whole.size() - kLongRecord;
  for (size_t size = last_begins; size < whole.size(); ++size) {
    write_bytes(path, whole.substr(0, size));
    ASSERT_EQ(records_of(folder.path("log")), expected) << size;
    ASSERT_EQ(fs::file_size(path), last_begins) << size;
  }
  // What comes next has the number of what was cut off.
  EXPECT_EQ(write_log(folder.path("log"), 11, 12).size(), 2U);
  EXPECT_EQ(records_of(folder.path("log")).back().number, 12U);
}

TEST(UpdateLogTest, PagesThatAPowerCutLeftAsZerosAreCutOff) {
  const ScratchFolder folder;
  const auto expected = write_log(folder.path("log"), 1, 5);
  const fs::path path = segments_in(folder.path("log")).front();
  write_bytes(path, bytes_of(path) + std::string(4096, '\0'));
  EXPECT_EQ(records_of(folder.path("log")), expected);
}

TEST(UpdateLogTest, AFlippedBitAnywhereIsRefusedWithFileAndOffset) {
  const ScratchFolder folder;
  write_log(folder.path("log"), 1, 12);
  const fs::path path = segments_in(folder.path("log")).front();
  const std::string whole = bytes_of(path);
  for (size_t byte = 0; byte < whole.size(); ++byte) {
    std::string damaged = whole;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << byte % 8));
    write_bytes(path, damaged);
    const std::string text = message_of<ConfigError>([&] { records_of(folder.path("log")); });
    ASSERT_EQ(text.find(path.string() + ": damaged at byte "), 0U) << byte << ": " << text;
    const size_t offset = std::stoul(text.substr(text.find("byte ") + 5));
    ASSERT_LE(offset, byte);
    ASSERT_GT(offset + kLongRecord, byte);
    ASSERT_EQ(fs::file_size(path), whole.size()) << "a refused log is left as it is";
  }
}

TEST(UpdateLogTest, SegmentsFollowEachOtherAndAMissingOneIsNamed) {
  const ScratchFolder folder;
  {
    UpdateLog log(folder.path("log"), 1, [](const Record&) {});
    for (uint64_t number = 1; number <= 30; ++number) {
      append(log, payload_of(number));
      if (number % 10 == 0) log.begin_segment();
    }
    log.begin_segment();  // Again: the last one is empty.
  }
  const auto segments = segments_in(folder.path("log"));
  ASSERT_EQ(segments.size(), 4U);
  EXPECT_EQ(records_of(folder.path("log")).size(), 30U);
  EXPECT_EQ(records_of(folder.path("log"), 31).size(), 0U);

  // A truncated record before the end of the log is corruption.
  const std::string second = bytes_of(segments[1]);
  write_bytes(segments[1], second.substr(0, second.size() - 1));
  EXPECT_NE(message_of<ConfigError>([&] {
              records_of(folder.path("log"));
            }).find("it ends within a record, and"),
            std::string::npos);
  fs::remove(segments[1]);
  EXPECT_EQ(message_of<ConfigError>([&] { records_of(folder.path("log")); }),
            segments[0].string() + ": expected 00000000000000000011.log to follow, found " +
                segments[2].string());
  EXPECT_EQ(records_of(folder.path("log"), 21).size(), 10U);  // A snapshot has what is missing.
  fs::remove(segments[0]);
  EXPECT_NE(message_of<ConfigError>([&] {
              records_of(folder.path("log"), 15);
            }).find("expected a log that holds record 15, it begins with 21"),
            std::string::npos);
  fs::remove(segments[2]);
  fs::remove(segments[3]);
  // A snapshot never comes without the log behind it: with nothing there, records may be lost.
  EXPECT_NE(message_of<ConfigError>([&] {
              records_of(folder.path("log"), 31);
            }).find("expected a log that continues with record 31, found none"),
            std::string::npos);
}

TEST(UpdateLogTest, SegmentsThatASnapshotReplacesAreRemoved) {
  const ScratchFolder folder;
  UpdateLog log(folder.path("log"), 1, [](const Record&) {});
  for (uint64_t number = 1; number <= 30; ++number) {
    append(log, payload_of(number));
    if (number % 10 == 0) log.begin_segment();
  }
  log.remove_before(21);
  EXPECT_EQ(segments_in(folder.path("log")).size(), 2U);
  log.remove_before(1000);  // The one that it writes stays.
  EXPECT_EQ(segments_in(folder.path("log")).size(), 1U);
  append(log, "x");
  EXPECT_EQ(log.next_number(), 32U);
}

TEST(UpdateLogTest, ASnapshotThatIsNewerThanTheLogGoesOnInAFileOfItsOwn) {
  const ScratchFolder folder;
  write_log(folder.path("log"), 1, 3);  // A power cut took 4 and 5, which a snapshot holds.
  for (uint64_t number = 6; number <= 8; ++number) {
    UpdateLog log(folder.path("log"), 6, [](const Record&) {});
    EXPECT_EQ(log.next_number(), number);
    append(log, payload_of(number));
  }
  EXPECT_EQ(records_of(folder.path("log"), 6).size(), 3U);
  EXPECT_EQ(segments_in(folder.path("log")).size(), 2U);
}

TEST(UpdateLogTest, ItsBytesAreThoseBehindTheSnapshotWhoeverAppendedThem) {
  const ScratchFolder folder;
  constexpr int64_t kRecord = 40 + 8;
  for (int64_t start = 0; start < 3; ++start) {
    UpdateLog log(folder.path("log"), 1, [](const Record&) {});
    EXPECT_EQ(log.bytes(), start * kRecord);
    append(log, "x");
    EXPECT_EQ(log.bytes(), (start + 1) * kRecord);
  }
  EXPECT_EQ(UpdateLog(folder.path("log"), 3, [](const Record&) {}).bytes(), kRecord);
}

TEST(UpdateLogTest, OnAFullDiskItIsAsBeforeAndGoesOnLater) {
  const ScratchFolder folder;
  UpdateLog log(folder.path("log"), 1, [](const Record&) {});
  append(log, "before");
  const fs::path path = segments_in(folder.path("log")).front();
  const auto size = fs::file_size(path);
  const std::string large(10'000, 'x');
  {
    const FileSizeLimit limit(size + 4'000);  // Within the payload.
    EXPECT_EQ(message_of<c10::Error>([&] { append(log, large); }),
              path.string() +
                  ": cannot write: File too large: expected a limit of file sizes (ulimit -f) of "
                  "at least " +
                  std::to_string(size + 40 + large.size()) + " bytes, got " +
                  std::to_string(size + 4'000) +
                  "; raise it with prlimit, or start the server again without it");
    EXPECT_EQ(fs::file_size(path), size);
    EXPECT_EQ(log.next_number(), 2U);
    append(log, "small");
    EXPECT_THROW(append(log, large), c10::Error);
  }
  append(log, large);
  const auto records = records_of(folder.path("log"));
  ASSERT_EQ(records.size(), 3U);
  EXPECT_EQ(records[1].payload, "small");
  EXPECT_EQ(records[2].payload, large);
}

// The folder, the file, or what is to sync the file cannot be opened.
TEST(UpdateLogTest, ASegmentThatCannotBeginLeavesNoFile) {
  const ScratchFolder folder;
  UpdateLog log(folder.path("log"), 1, [](const Record&) {});
  append(log, "before");
  const int lowest = ::dup(0);
  ::close(lowest);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  for (const rlim_t more : {0, 1, 2}) {
    const rlimit limit{static_cast<rlim_t>(lowest) + more, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    const std::string text = message_of<ConfigError>([&] { log.begin_segment(); });
    ::setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_NE(text.find("Too many open files"), std::string::npos) << text;
    EXPECT_EQ(segments_in(folder.path("log")).size(), 1U);
  }
  append(log, "after");
  EXPECT_EQ(records_of(folder.path("log")).size(), 2U);
  log.begin_segment();
  append(log, "later");
  EXPECT_EQ(records_of(folder.path("log")).size(), 3U);
}

// Its length is 4 bytes: cut off, it would be a file that nobody can read.
TEST(UpdateLogTest, ARecordOfFourGibibytesIsRefusedBeforeItIsWritten) {
  const ScratchFolder folder;
  constexpr size_t kBytes = size_t{1} << 32;
  // Address space alone: touching it would end the test.
  void* const address = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(address, MAP_FAILED);
  const std::array<Record, 2> records{
      Record{.number = 1},
      Record{.number = 2, .payload = {static_cast<const std::byte*>(address), kBytes}}};
  EXPECT_EQ(message_of<c10::ValueError>([&] { write_records(folder.path("records"), records); }),
            folder.path("records") + ": record 2 has 4294967296 bytes; expected less than 4 GiB");
  EXPECT_FALSE(fs::exists(folder.path("records")));
  ::munmap(address, kBytes);
}

TEST(UpdateLogTest, AFileOfRecordsIsWholeOrRefused) {
  const ScratchFolder folder;
  const std::string path = folder.path("records");
  std::vector<std::string> payloads;
  for (uint64_t number = 1; number <= 5; ++number) payloads.push_back(payload_of(number));
  std::vector<Record> records;
  for (uint64_t number = 1; number <= 5; ++number) {
    records.push_back({.number = number,
                       .kind = RecordKind::kJob,
                       .payload = std::as_bytes(std::span(payloads[number - 1]))});
  }
  write_records(path, records);
  size_t count = 0;
  read_records(path, [&](const Record& record) { count += record.number == count + 1; });
  EXPECT_EQ(count, 5U);
  const std::string whole = bytes_of(path);
  for (size_t size = 0; size < whole.size(); ++size) {
    write_bytes(path, whole.substr(0, size));
    const std::string text =
        message_of<ConfigError>([&] { read_records(path, [](const Record&) {}); });
    ASSERT_EQ(text.find(path), 0U) << size << ": " << text;
  }
  count = 0;  // What stands behind those that are wanted is not looked at.
  read_records(
      path, [&](const Record&) { ++count; }, 3);
  EXPECT_EQ(count, 3U);
}

}  // namespace update_log_test
}  // namespace cohort::ps
