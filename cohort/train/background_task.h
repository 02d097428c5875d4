// SPDX-License-Identifier: Apache-2.0
// One thing at a time on a thread of its own.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <thread>
#include <unistd.h>

namespace cohort::train {

/// Training comes first: the thread's niceness is its process's and 10. Where all cores are busy,
/// it gets what training leaves over, when it waits for other ranks say, and a tenth of a core.
/// Threads: one caller. The destructor waits for what runs. exit() does, too, while OpenSSL and the
///          static objects that are older than the first task are still there; in a forked
///          process, for the tasks that were made in it.
class BackgroundTask {
 public:
  explicit BackgroundTask(const std::string& thread_name);
  ~BackgroundTask();
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  /// Runs `work`. Blocks until the one before has ended.
  void start(std::function<void()> work);
  /// Blocks until nothing runs, whether it succeeded or not.
  void wait_idle();
  /// The same.
  /// Errors: of the works since the last call, the first that was thrown.
  void wait();
  bool busy() const;
  /// Whether the thread is one of this process, not of one that forked it.
  bool is_of_this_process() const { return process_ == ::getpid(); }

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;  // Guarded by mutex_, as the two below; stays until it is done.
  std::exception_ptr error_;
  bool stop_ = false;
  const pid_t process_ = ::getpid();  // A process that it forks has no such thread.
  std::thread thread_;
};

}  // namespace cohort::train
