// SPDX-License-Identifier: Apache-2.0
// Calls at given times, for all of a client's links on one thread.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace cohort::ps {

/// Calls run one after another: one that blocks delays all others.
///
/// Threads: any.
class TimerThread {
 public:
  using Time = std::chrono::steady_clock::time_point;

  TimerThread();
  /// Waits for the call that runs; drops those that are due later.
  ~TimerThread();

  /// Calls `work` at `time`, or as soon as possible after it. Calls of one time: in this order.
  /// `owner`: any address, by which to cancel.
  void call_at(const void* owner, Time time, std::function<void()> work);
  /// Drops the owner's calls: none runs or begins after this returns, but for the one that calls
  /// this itself.
  void cancel(const void* owner);

 private:
  struct Call {
    const void* owner = nullptr;
    std::function<void()> work;
  };
  void run(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::multimap<Time, Call> calls_;  // guarded by mutex_
  const void* running_ = nullptr;    // guarded by mutex_: the owner of the call that runs.
  std::jthread thread_;
};

}  // namespace cohort::ps
