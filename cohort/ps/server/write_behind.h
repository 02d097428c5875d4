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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "cohort/base/fd.h"

namespace cohort::ps {

/// Syncs every kWindowBytes or kPeriod, and when it is asked to; later if the disk does not keep up.
/// An error of the disk is kept for the caller, because the system reports it once.
/// Threads: one caller; the work is on a thread of its own.
class WriteBehind {
 public:
  static constexpr int64_t kWindowBytes = int64_t{32} << 20;
  static constexpr std::chrono::milliseconds kPeriod{1000};

  /// `synced`: called after each sync that was asked for, on this object's thread, whether it
  /// succeeded or not; may be empty.
  explicit WriteBehind(int64_t window_bytes = kWindowBytes, std::function<void()> synced = {});
  /// Waits for the sync that is on its way.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// The first call: a new file, which is there, begins at `path`, or an existing one continues,
  /// whose first `bytes` are ignored. It is looked after also when it has lost its name.
  /// Errors: ConfigError if it cannot be opened: the file before it is looked after still.
  void begin(const std::string& path, int64_t bytes);
  /// The file has grown to `bytes`; `number` is the last record in it. Does not block.
  void grown_to(int64_t bytes, uint64_t number);
  /// Asks for a sync of what the file has now. If one is under way, another one follows. Does not
  /// block.
  void sync_soon();
  /// The last record that a sync of the disk has covered; 0: none.
  uint64_t synced() const { return synced_; }
  /// The number of errno with which the disk refused what was sent to it, at any time, or with which
  /// a sync that was asked for failed, for whatever reason; 0: none.
  int error() const { return error_; }

 private:
  void work();
  /// Returns whether the disk has the file.
  bool sync(int file, uint64_t number, bool is_asked);

  const int64_t window_bytes_;
  const std::function<void()> on_synced_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const Fd> file_;  // Guarded by mutex_, like what follows.
  int64_t handled_ = 0;
  int64_t bytes_ = 0;
  int64_t dropped_ = 0;  // Bytes from the file's begin that were let go.
  uint64_t number_ = 0;
  bool is_asked_ = false;
  bool ends_ = false;
  std::atomic<uint64_t> synced_ = 0;
  std::atomic<int> error_ = 0;
  std::thread thread_;
};

}  // namespace cohort::ps
