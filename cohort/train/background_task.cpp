#include "cohort/train/background_task.h"

#include <pthread.h>
#include <utility>

namespace cohort::train {

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
    work_ = nullptr;  // with the copies that it holds
    changed_.notify_all();
  }
}

}  // namespace cohort::train
