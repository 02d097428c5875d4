// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/side_task.h"

#include <pthread.h>
#include <utility>

namespace cohort::ps {

SideTask::SideTask(const char* thread_name, std::function<void()> task)
    : task_(std::move(task)), thread_([this] { work(); }) {
  ::pthread_setname_np(thread_.native_handle(), thread_name);
}

SideTask::~SideTask() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  asked_.notify_one();
  thread_.join();
}

void SideTask::begin() {
  {
    const std::lock_guard lock(mutex_);
    state_ = State::kAsked;
  }
  asked_.notify_one();
}

void SideTask::finish() {
  std::unique_lock lock(mutex_);
  if (state_ == State::kAsked) {
    state_ = State::kIdle;
    lock.unlock();
    return task_();
  }
  done_.wait(lock, [this] { return state_ == State::kIdle; });
}

void SideTask::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_.wait(lock, [this] { return ends_ || state_ == State::kAsked; });
    if (ends_) return;
    state_ = State::kRuns;
    lock.unlock();
    task_();
    lock.lock();
    state_ = State::kIdle;
    done_.notify_one();
  }
}

}  // namespace cohort::ps
