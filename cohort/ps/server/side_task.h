// SPDX-License-Identifier: Apache-2.0
// Work that another thread does beside its caller, again and again.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace cohort::ps {

/// Runs one task on a thread of its own, each time that it is asked to.
/// Threads: one caller.
class SideTask {
 public:
  /// `task` must not throw. `thread_name`: at most 15 characters.
  SideTask(const char* thread_name, std::function<void()> task);
  /// Waits for the task if it runs; one that was asked for and does not run yet is dropped.
  ~SideTask();
  SideTask(const SideTask&) = delete;
  SideTask& operator=(const SideTask&) = delete;

  /// Asks for the task: once before each finish(). Does not block.
  void begin();
  /// Returns when the task is done: it waits for the other thread, or runs the task itself if the
  /// other thread has not begun it, for example because all CPUs are busy.
  void finish();

 private:
  enum class State { kIdle, kAsked, kRuns };

  void work();

  const std::function<void()> task_;
  std::mutex mutex_;
  std::condition_variable asked_, done_;
  State state_ = State::kIdle;  // Guarded by mutex_.
  bool ends_ = false;           // Likewise.
  std::thread thread_;
};

}  // namespace cohort::ps
