// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/server.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/server/request_handler.h"

namespace cohort::ps {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kTick{100};

}  // namespace

// The queue, and the thread that processes it.
class Server::Owner {
 public:
  Owner(const ServerOptions& options, const Log& log)
      : max_queue_bytes_(options.max_queue_bytes), handler_(options, log, [this] { wake(); }) {
    thread_ = std::jthread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "ps-owner");
  }

  ~Owner() { stop(); }

  Pending check(Request request) const {
    return handler_.arrival_check().check(std::move(request));
  }

  void submit(Pending pending) {
    const int64_t bytes = bytes_of(pending);
    {
      const std::lock_guard lock(mutex_);
      if (!stopping_ && has_room(bytes)) {
        queued_bytes_ += bytes;
        queue_.push_back(std::move(pending));
        if (queue_.size() == 1) wake_.notify_one();
        return;
      }
    }
    Reply refused{.code = Code::kLost, .text = "the server is shutting down"};
    if (!is_stopping()) refused = {.code = Code::kBusy, .text = "the server's queue is full"};
    pending.done(std::move(refused));
  }

  // A message larger than the queue is taken beside what the queue holds, or it might wait for ever.
  bool has_room(int64_t bytes) const {
    const int64_t queued = queued_bytes_;
    if (bytes > max_queue_bytes_) return queued <= max_queue_bytes_;
    return bytes == 0 || queued + bytes <= max_queue_bytes_;
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return has_ended_; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  static int64_t bytes_of(const Pending& pending) {
    const auto& message = pending.request.message;
    return static_cast<int64_t>(message ? message->size() : pending.request.text.size());
  }

  // From the thread of the log, when the disk has what answers wait for.
  void wake() {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    wake_.notify_one();
  }

  bool is_stopping() {
    const std::lock_guard lock(mutex_);
    return stopping_;
  }

  // Takes what there is, or waits until the next tick.
  std::vector<Pending> take(steady_clock::time_point until) {
    std::vector<Pending> batch;
    std::unique_lock lock(mutex_);
    wake_.wait_until(lock, until, [this] { return stopping_ || woken_ || !queue_.empty(); });
    woken_ = false;
    batch.swap(queue_);
    return batch;
  }

  void run() {
    std::exception_ptr error;
    std::vector<Pending> batch;
    size_t handled = 0;  // Of the batch.
    try {
      auto next_tick = steady_clock::now() + kTick;
      while (!handler_.is_stopped() && !is_stopping()) {
        batch = take(next_tick);
        for (handled = 0; handled < batch.size();) {
          Pending& next = batch[handled++];
          const int64_t bytes = bytes_of(next);
          handler_.handle(std::move(next));
          queued_bytes_ -= bytes;
        }
        const auto now = steady_clock::now();
        handler_.finish_batch(now);
        if (now < next_tick) continue;
        handler_.tick(now);
        next_tick = now + kTick;
      }
      handler_.finish();
    } catch (...) {
      error = std::current_exception();
    }
    std::vector<Pending> queued;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      has_ended_ = true;
      error_ = error;
      queued.swap(queue_);
    }
    // The transport waits for all replies before it ends.
    handler_.close();
    batch.erase(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(handled));
    for (auto* const left : {&batch, &queued}) {
      for (Pending& pending : *left)
        pending.done({.code = Code::kLost, .text = "the server is shutting down"});
    }
    ended_.notify_all();
  }

  const int64_t max_queue_bytes_;
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::vector<Pending> queue_;
  std::atomic<int64_t> queued_bytes_ = 0;  // Of messages that are not handled, taken or not.
  bool woken_ = false;
  bool stopping_ = false;
  bool has_ended_ = false;
  std::exception_ptr error_;
  RequestHandler handler_;
  std::jthread thread_;
};

Server::Server(const ServerOptions& options, const Log& log)
    : owner_(std::make_unique<Owner>(options, log)) {}

Server::~Server() = default;

void Server::submit(Request request, Done done) {
  Pending pending;
  try {
    pending = owner_->check(std::move(request));
  } catch (const std::exception& error) {
    return done({.code = Code::kInvalid, .text = refusal_text(error)});
  }
  pending.done = std::move(done);
  owner_->submit(std::move(pending));
}

bool Server::has_room(int64_t bytes) const {
  return owner_->has_room(bytes);
}

void Server::wait() {
  owner_->wait();
}

void Server::stop() {
  owner_->stop();
}

}  // namespace cohort::ps
