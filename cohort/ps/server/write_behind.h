// SPDX-License-Identifier: Apache-2.0
// Syncs a file while it grows, and then drops it from the system's page cache.
//
// Otherwise the system writes the log half a minute later and keeps all of it in its cache: each
// record is copied to fresh pages, which costs several times as much as pages in use, and evicts
// what other processes read.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace cohort::ps {

/// Syncs every kWindowBytes or kPeriod; later if the disk does not keep up. An error of the disk is
/// kept for the caller, because the system reports it once.
/// Threads: one caller; the work is on a thread of its own.
class WriteBehind {
 public:
  static constexpr int64_t kWindowBytes = int64_t{32} << 20;
  static constexpr std::chrono::milliseconds kPeriod{1000};

  explicit WriteBehind(int64_t window_bytes = kWindowBytes);
  /// Waits for the sync that is on its way.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// A new file begins at `path`, or an existing one continues, whose first `bytes` are ignored.
  void begin(const std::string& path, int64_t bytes);
  /// The file has grown to `bytes`; `number` is the last record in it. Does not block.
  void grown_to(int64_t bytes, uint64_t number);
  /// The last record that a sync of the disk has covered; 0: none.
  uint64_t synced() const { return synced_; }
  /// The number of errno with which the disk refused what was sent to it, at any time; 0: none.
  int error() const { return error_; }

 private:
  void work();
  void sync(const std::string& path, int64_t bytes, uint64_t number);

  const int64_t window_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string path_;  // Guarded by mutex_, like what follows.
  int64_t handled_ = 0;
  int64_t bytes_ = 0;
  uint64_t number_ = 0;
  bool ends_ = false;
  std::atomic<uint64_t> synced_ = 0;
  std::atomic<int> error_ = 0;
  std::thread thread_;
};

}  // namespace cohort::ps
