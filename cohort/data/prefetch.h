// SPDX-License-Identifier: Apache-2.0
// Prepares items on its own thread while the caller works on the previous one.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <pthread.h>
#include <stop_token>
#include <thread>
#include <utility>

namespace cohort::data {

/// Runs `produce` up to `depth` items ahead of next(). Items come in the order they were made.
///
/// Owner:   `produce` and all it refers to must outlive the Prefetcher; it is called on the
///          Prefetcher's thread only, one call at a time, and never again after it returned
///          nothing or threw.
/// Threads: one caller of next() at a time.
/// The destructor waits for the running call of `produce` and for no other.
template <class T>
class Prefetcher {
 public:
  /// `produce` returns the next item, or nothing at the end. `depth` > 0 items wait at most.
  explicit Prefetcher(std::function<std::optional<T>()> produce, size_t depth = 2)
      : produce_(std::move(produce)),
        depth_(depth > 0 ? depth : 1),
        thread_([this](std::stop_token stop) { run(stop); }) {
    pthread_setname_np(thread_.native_handle(), "prefetch");
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// Returns the next item, or nothing once the end is reached.
  /// Blocks: until `produce` has made it.
  /// Errors: what `produce` threw, after the items made before it, and on every later call.
  std::optional<T> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !items_.empty() || ended_; });
    if (items_.empty()) {
      if (error_) std::rethrow_exception(error_);
      return std::nullopt;
    }
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    lock.unlock();
    changed_.notify_all();
    return item;
  }

 private:
  void run(const std::stop_token& stop) {
    std::exception_ptr error;
    try {
      while (true) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, stop, [this] { return items_.size() < depth_; });
          if (stop.stop_requested()) break;
        }
        auto item = produce_();
        if (!item || stop.stop_requested()) break;
        {
          std::scoped_lock lock(mutex_);
          items_.push_back(std::move(*item));
        }
        changed_.notify_all();
      }
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::scoped_lock lock(mutex_);
      error_ = std::move(error);
      ended_ = true;
    }
    changed_.notify_all();
  }

  std::function<std::optional<T>()> produce_;
  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<T> items_;  // Guarded by mutex_, as the two below.
  std::exception_ptr error_;
  bool ended_ = false;
  std::jthread thread_;  // Last: it uses all of the above, and is joined before they go.
};

}  // namespace cohort::data
