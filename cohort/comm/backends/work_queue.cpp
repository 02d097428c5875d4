// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/work_queue.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <utility>

namespace cohort::comm {

QueuedWork::QueuedWork(int rank, c10d::OpType type, const char* title, Tensors results,
                       std::function<void()> run)
    : Work(rank, type, at::hasCallbacks() ? title : nullptr, results),
      results_(std::move(results)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      run_(std::move(run)) {}

void QueuedWork::end(std::exception_ptr error, int source) {
  source_ = source;
  try {
    // Before anybody can see that it is over, and end the profiler.
    if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
  } catch (...) {  // of a callback
    if (!error) error = std::current_exception();
  }
  finish(std::move(error));
}

std::exception_ptr QueuedWork::run() noexcept {
  std::exception_ptr error;
  try {
    run_();
  } catch (...) {
    error = std::current_exception();
  }
  run_ = nullptr;  // lets go of the tensors
  return error;
}

void WorkQueue::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool WorkQueue::is_busy() {
  const std::lock_guard lock(mutex_);
  return num_left_ > 0;
}

void WorkQueue::run(QueuedWork& work) noexcept {
  const std::exception_ptr error = work.run();
  {
    const std::lock_guard lock(mutex_);
    --num_left_;
  }
  work.end(error);
}

void WorkQueue::launch(const c10::intrusive_ptr<QueuedWork>& work, bool in_background) {
  std::unique_lock lock(mutex_);
  ++num_left_;
  if (!in_background && !busy_ && queue_.empty()) {
    busy_ = true;
    lock.unlock();
    run(*work);
    lock.lock();
    busy_ = false;
    if (!queue_.empty()) changed_.notify_all();
    return;
  }
  work->keep_state();
  queue_.push_back(work);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run_all(); });
    pthread_setname_np(thread_.native_handle(), thread_name_.c_str());
  }
  lock.unlock();
  changed_.notify_all();
}

void WorkQueue::run_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return (!queue_.empty() && !busy_) || (ending_ && queue_.empty()); });
    if (queue_.empty()) return;
    const auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    {
      std::optional<at::ThreadLocalStateGuard> guard;
      if (work->state_) guard.emplace(*work->state_);
      run(*work);
    }
    lock.lock();
    busy_ = false;
  }
}

}  // namespace cohort::comm
