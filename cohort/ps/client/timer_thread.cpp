// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/client/timer_thread.h"

#include <pthread.h>
#include <utility>
#include <vector>

namespace cohort::ps {

TimerThread::TimerThread() : thread_([this](const std::stop_token& stop) { run(stop); }) {
  pthread_setname_np(thread_.native_handle(), "ps-timer");
}

TimerThread::~TimerThread() {
  thread_.request_stop();
  thread_.join();
}

void TimerThread::call_at(const void* owner, Time time, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    calls_.emplace(time, Call{owner, std::move(work)});
  }
  changed_.notify_all();
}

void TimerThread::cancel(const void* owner) {
  std::vector<std::function<void()>> dropped;  // What they hold may cancel, too, when it goes.
  std::unique_lock lock(mutex_);
  std::erase_if(calls_, [&](auto& call) {
    if (call.second.owner != owner) return false;
    dropped.push_back(std::move(call.second.work));
    return true;
  });
  if (std::this_thread::get_id() != thread_.get_id())
    changed_.wait(lock, [&] { return running_ != owner; });
  lock.unlock();
}

void TimerThread::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    const auto first = calls_.begin();
    if (first == calls_.end()) {
      changed_.wait(lock, stop, [this] { return !calls_.empty(); });
      continue;
    }
    if (const Time due = first->first; due > std::chrono::steady_clock::now()) {
      changed_.wait_until(lock, stop, due,
                          [&] { return calls_.empty() || calls_.begin()->first < due; });
      continue;
    }
    Call call = std::move(first->second);
    calls_.erase(first);
    running_ = call.owner;
    lock.unlock();
    call.work();
    call.work = nullptr;
    lock.lock();
    running_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace cohort::ps
