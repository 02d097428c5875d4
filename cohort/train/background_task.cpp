// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/background_task.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

namespace cohort::train {
namespace {

// Of the calling thread. A process with real-time priority hands that to its threads, too. Going
// lower is always allowed.
void lower_priority() {
  const sched_param none{};
  ::sched_setscheduler(0, SCHED_BATCH, &none);
  const auto thread = static_cast<id_t>(::gettid());
  ::setpriority(PRIO_PROCESS, thread, ::getpriority(PRIO_PROCESS, thread) + 10);
}

}  // namespace

BackgroundTask::BackgroundTask(const std::string& thread_name) : thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), thread_name.c_str());
}

BackgroundTask::~BackgroundTask() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BackgroundTask::start(std::function<void()> work) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !work_; });
    work_ = std::move(work);
  }
  changed_.notify_all();
}

void BackgroundTask::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_; });
}

void BackgroundTask::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool BackgroundTask::busy() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<bool>(work_);
}

void BackgroundTask::run() {
  lower_priority();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return work_ || stop_; });
    if (!work_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      work_();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    work_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace cohort::train
