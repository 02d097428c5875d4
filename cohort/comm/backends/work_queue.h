// SPDX-License-Identifier: Apache-2.0
// Operations of a backend that run one after another: on the caller's thread or on one of its own.
#pragma once
#include <ATen/ThreadLocalState.h>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cohort::comm {

/// An operation, and what its caller waits for.
class QueuedWork : public c10d::Work {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// `title`: in a profiler's trace. `run`: does it, and throws what `wait` then throws; empty:
  /// something else calls `end`.
  QueuedWork(int rank, c10d::OpType type, const char* title, Tensors results,
             std::function<void()> run = {});

  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  int sourceRank() const override { return source_; }

  /// It is over. `source`: the sender, of a message. What a callback of the future throws, `wait`
  /// throws if it has nothing else to throw.
  void end(std::exception_ptr error, int source = -1);

 private:
  friend class WorkQueue;
  void keep_state() { state_.emplace(); }
  std::exception_ptr run() noexcept;

  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;
  std::function<void()> run_;
  std::optional<at::ThreadLocalState> state_;  // the caller's, for a thread that runs it instead
};

/// Runs operations in the order of `launch`. One that the caller waits for at once runs on the
/// caller's thread if none is under way; others on a thread of the queue, where a future's
/// callbacks run too.
/// Threads: any.
class WorkQueue {
 public:
  /// `thread_name`: of at most 15 characters.
  explicit WorkQueue(std::string thread_name) : thread_name_(std::move(thread_name)) {}
  ~WorkQueue() { end(); }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void launch(const c10::intrusive_ptr<QueuedWork>& work, bool in_background);
  /// Waits for what is under way. Nothing may be launched afterwards but by it.
  void end();
  /// Whether an operation has not run. One whose end can be seen has.
  bool is_busy();

 private:
  void run(QueuedWork& work) noexcept;
  void run_all();

  const std::string thread_name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<QueuedWork>> queue_;
  size_t num_left_ = 0;  // have not run
  bool busy_ = false;    // an operation runs, or a callback of its future
  bool ending_ = false;
  std::thread thread_;  // begun by the first operation in the background
};

}  // namespace cohort::comm
