// SPDX-License-Identifier: Apache-2.0
// Threads that share the work of one operation with its caller.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace cohort::ps {

/// Owns all but one of the threads of a server's tables; the caller of run() is the other one.
/// Between operations they sleep. They are named ps-table-1, ps-table-2 and so on.
/// Threads: one caller at a time. A forked child has none of the threads: there nothing of this may
/// be called, and no lock is held that it could need.
class TableThreads {
 public:
  static constexpr int kMost = 64;

  /// Errors: ConfigError unless `count` is 1 to kMost; std::system_error: the system has no thread.
  explicit TableThreads(int count);
  ~TableThreads();
  TableThreads(const TableThreads&) = delete;
  TableThreads& operator=(const TableThreads&) = delete;

  size_t count() const { return errors_.size(); }

  /// Calls `work(number)` once for each number in [0, count()), at the same time, 0 in the calling
  /// thread. Blocks until all have ended.
  /// Errors: what `work` threw for the lowest number.
  void run(const std::function<void(size_t)>& work);

 private:
  void attend(size_t number);
  void do_work(size_t number);
  void await_others();
  void end();

  const std::function<void(size_t)>* work_ = nullptr;  // nullptr in a new round: the threads end.
  std::vector<std::exception_ptr> errors_;             // One for each thread, the caller's first.
  std::atomic<uint32_t> round_ = 0;
  std::atomic<uint32_t> running_ = 0;  // Threads that have not ended this round's work.
  const bool spins_;                   // run() waits awake for a moment before it sleeps.
  std::vector<std::jthread> threads_;
};

}  // namespace cohort::ps
