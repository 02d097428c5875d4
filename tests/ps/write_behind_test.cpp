// SPDX-License-Identifier: Apache-2.0
// What a file that was written lets go of.
#include "cohort/ps/server/write_behind.h"

#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"

#include "tests/ps/disk_calls.h"

namespace cohort::ps {
namespace write_behind_test {

constexpr int64_t kWindow = 1 << 20;

// Of the first `bytes` of a file, those that the system's cache holds.
int64_t cached_bytes(int file, int64_t bytes) {
  const auto length = static_cast<size_t>(bytes);
  void* const address = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file, 0);
  EXPECT_NE(address, MAP_FAILED);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((length + page - 1) / page);
  EXPECT_EQ(::mincore(address, length, resident.data()), 0);
  ::munmap(address, length);
  int64_t pages = 0;
  for (const unsigned char each : resident) pages += each & 1;
  return pages * static_cast<int64_t>(page);
}

class WriteBehindTest : public testing::Test {
 protected:
  ~WriteBehindTest() override { std::filesystem::remove(path_); }

  void append_window() {
    const std::vector<char> bytes(kWindow, 'x');
    ASSERT_EQ(::write(file_.get(), bytes.data(), bytes.size()), kWindow);
    written_ += kWindow;
  }

  // In the build's folder, not in one that may lie in memory.
  const std::string path_ = "write_behind_test." + std::to_string(::getpid());
  const Fd file_{::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
  int64_t written_ = 0;
};

TEST_F(WriteBehindTest, WhatIsOnTheDiskLeavesTheCache) {
  for (int i = 0; i < 64; ++i) append_window();
  EXPECT_GT(cached_bytes(file_.get(), written_), written_ / 2) << "what the system does by itself";
  WriteBehind write_behind(kWindow);
  write_behind.begin(path_, 0);
  const int64_t first = written_;
  for (int i = 0; i < 600 && cached_bytes(file_.get(), first) > first / 8; ++i) {
    append_window();
    write_behind.grown_to(written_, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_LE(cached_bytes(file_.get(), first), first / 8);
}

TEST_F(WriteBehindTest, AFileThatIsGoneHarmsNobody) {
  WriteBehind write_behind(kWindow);
  write_behind.begin(path_, 0);
  std::filesystem::remove(path_);
  append_window();
  write_behind.grown_to(written_, 1);
  const std::string never = path_ + ".never";
  EXPECT_THROW(write_behind.begin(never, kWindow), ConfigError);
  // The next one is looked after as ever.
  const std::string next = path_ + ".next";
  std::ofstream(next) << std::string(kWindow, 'x');
  write_behind.begin(next, 0);
  write_behind.grown_to(kWindow, 1);
  for (int i = 0; i < 600 && disk_calls::count(disk_calls::Call::kDropPages, next) == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(disk_calls::count(disk_calls::Call::kDropPages, next), 1);
  EXPECT_EQ(write_behind.error(), 0);
  EXPECT_FALSE(std::filesystem::exists(never));
  std::filesystem::remove(next);
}

}  // namespace write_behind_test
}  // namespace cohort::ps
