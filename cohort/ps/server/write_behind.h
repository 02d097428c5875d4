// Sends a growing file to the disk while it grows, and then lets go of the memory that held it.
//
// A log is read again only after a crash. Left to itself, all of it stays in the system's cache:
// each record is copied to memory that nobody had touched before, which costs several times as much
// as memory in use, and pushes out what others read.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

namespace cohort::ps {

/// A hint: what it does promises nothing about the disk, and where the disk does not keep up the
/// file is left to the system. An error of the disk is kept for the caller, for the system tells it
/// once. Threads: one calls, one of its own works.
class WriteBehind {
 public:
  static constexpr int64_t kWindowBytes = int64_t{32} << 20;

  /// So much is sent at a time.
  explicit WriteBehind(int64_t window_bytes = kWindowBytes);
  /// Waits for the window that is on its way.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// A new file begins at `path`, or one goes on, whose first `bytes` are not looked after.
  void begin(const std::string& path, int64_t bytes);
  /// The file has grown to `bytes`. Does not block.
  void grown_to(int64_t bytes);
  /// The number of errno with which the disk refused what was sent to it, at any time; 0: none.
  int error() const { return error_; }

 private:
  struct Window {
    std::string path;
    int64_t begin = 0;
    int64_t end = 0;
  };
  void work();

  const int64_t window_bytes_;
  std::string path_;
  int64_t handled_ = 0;  // Of the file: what lies before was given to the thread, or up.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Window> waiting_;
  bool ends_ = false;
  std::atomic<int> error_ = 0;
  std::thread thread_;
};

}  // namespace cohort::ps
