// Syncs a growing file while it grows, and then lets go of the memory that held it.
//
// Without it a log reaches the disk when the system likes, half a minute later, and all of it stays
// in the system's cache: each record is copied to memory that nobody had touched before, which
// costs several times as much as memory in use, and pushes out what others read.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace cohort::ps {

/// Syncs what is kWindowBytes, or kPeriod old; where the disk does not keep up, later. An error of
/// the disk is kept for the caller, for the system tells it once. Threads: one calls, one of its
/// own works.
class WriteBehind {
 public:
  static constexpr int64_t kWindowBytes = int64_t{32} << 20;
  static constexpr std::chrono::milliseconds kPeriod{1000};

  explicit WriteBehind(int64_t window_bytes = kWindowBytes);
  /// Waits for the sync that is on its way.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// A new file begins at `path`, or one goes on, whose first `bytes` are not looked after.
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
