// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/background_task.h"

#include <cstdlib>
#include <pthread.h>
#include <sched.h>
#include <set>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/checksum.h"

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

struct Tasks {
  std::mutex mutex;
  std::set<BackgroundTask*> all;
};

// Lives for ever: a task may end after static objects.
Tasks& tasks() {
  static auto* const instance = new Tasks;
  return *instance;
}

void wait_for_all() {
  const std::scoped_lock lock(tasks().mutex);
  for (BackgroundTask* task : tasks().all)
    if (task->is_of_this_process()) task->wait_idle();
}

// OpenSSL, by which works make checksums, is taken down by exit() in a function that it registers
// when it is first used. What is registered later runs earlier.
void wait_at_exit() {
  static const bool registered = [] {
    Sha256().hex();
    return std::atexit(wait_for_all) == 0;
  }();
  static_cast<void>(registered);
}

}  // namespace

BackgroundTask::BackgroundTask(const std::string& thread_name) : thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), thread_name.c_str());
  wait_at_exit();
  const std::scoped_lock lock(tasks().mutex);
  tasks().all.insert(this);
}

BackgroundTask::~BackgroundTask() {
  {
    const std::scoped_lock lock(tasks().mutex);
    tasks().all.erase(this);
  }
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
