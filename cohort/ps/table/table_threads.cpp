// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/table_threads.h"

#include <chrono>
#include <pthread.h>
#include <sched.h>
#include <string>

#include "cohort/base/error.h"

namespace cohort::ps {
namespace {

// About as long as it takes to wake a thread.
constexpr std::chrono::microseconds kSpin{50};

// Whether each of `count` threads can have a core of its own.
bool have_cores(int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 && count <= CPU_COUNT(&set);
}

void pause_core() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

}  // namespace

TableThreads::TableThreads(int count) : spins_(have_cores(count)) {
  if (count < 1 || count > kMost) {
    throw ConfigError("table_threads: expected 1 to " + std::to_string(kMost) + ", got " +
                      std::to_string(count));
  }
  errors_.resize(static_cast<size_t>(count));
  try {
    for (size_t number = 1; number < errors_.size(); ++number) {
      threads_.emplace_back([this, number] { attend(number); });
      const std::string name = "ps-table-" + std::to_string(number);
      pthread_setname_np(threads_.back().native_handle(), name.c_str());
    }
  } catch (...) {
    end();  // Those that began are joined.
    throw;
  }
}

TableThreads::~TableThreads() {
  end();
}

void TableThreads::end() {
  work_ = nullptr;
  ++round_;
  round_.notify_all();
}

void TableThreads::run(const std::function<void(size_t)>& work) {
  work_ = &work;
  running_ = static_cast<uint32_t>(threads_.size());
  ++round_;
  round_.notify_all();
  do_work(0);
  await_others();
  std::exception_ptr first;
  for (std::exception_ptr& error : errors_) {
    if (!first) first = error;
    error = nullptr;
  }
  if (first) std::rethrow_exception(first);
}

void TableThreads::await_others() {
  using Clock = std::chrono::steady_clock;
  // They end about when the caller does: to sleep would cost more than the wait.
  for (const auto end = Clock::now() + kSpin; spins_ && Clock::now() < end;) {
    for (int turn = 0; turn < 64; ++turn) {
      if (running_ == 0) return;
      pause_core();
    }
  }
  for (uint32_t left = running_; left != 0; left = running_) running_.wait(left);
}

void TableThreads::attend(size_t number) {
  for (uint32_t seen = 0;;) {
    round_.wait(seen);
    // No round is left out: the next one begins when this thread has ended its work.
    ++seen;
    if (work_ == nullptr) return;
    do_work(number);
    if (--running_ == 0) running_.notify_one();
  }
}

void TableThreads::do_work(size_t number) {
  try {
    (*work_)(number);
  } catch (...) {
    errors_[number] = std::current_exception();
  }
}

}  // namespace cohort::ps
