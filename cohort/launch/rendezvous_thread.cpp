// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/rendezvous_thread.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <poll.h>
#include <sys/eventfd.h>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/program.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollTime{250};  // Between two attempts to connect, at most.

// A heartbeat that is due does not wait longer.
int poll_ms(const RunOptions& options) {
  const milliseconds time =
      std::clamp(options.keep_alive.heartbeat_interval(), milliseconds(1), kPollTime);
  return static_cast<int>(time.count());
}

Fd make_event() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw std::system_error(errno, std::generic_category(), "eventfd");
  return fd;
}

void raise(const Fd& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t size = ::write(event.get(), &one, sizeof(one));
}

void clear(const Fd& event) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = ::read(event.get(), &count, sizeof(count));
}

std::optional<RendezvousServer> host(const RunOptions& options) {
  const Endpoint endpoint = parse_endpoint(options.rdzv_endpoint);
  std::optional<RendezvousServer> server;
  if (auto listener = listen_if_local(endpoint))
    server.emplace(std::move(*listener), endpoint.host, options);
  return server;
}

}  // namespace

RendezvousThread::RendezvousThread(const RunOptions& options)
    : server_(host(options)),
      hosts_(server_.has_value()),
      poll_ms_(poll_ms(options)),
      client_(parse_endpoint(options.rdzv_endpoint), options),
      wake_(make_event()),
      ready_(make_event()),
      thread_([this] { run(); }) {}

RendezvousThread::~RendezvousThread() {
  if (!thread_.joinable()) return;
  post([this] {
    client_.leave();
    over_ = true;
  });
  thread_.join();
}

void RendezvousThread::post(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  raise(wake_);
}

void RendezvousThread::join(int store_port) {
  post([this, store_port] { client_.join(store_port); });
}

void RendezvousThread::send_done(int code) {
  post([this, code] { client_.send_done(code); });
}

void RendezvousThread::send_failed(const JobOutcome& job, const std::string& why) {
  post([this, job, why] { client_.send_failed(job, why); });
}

std::optional<Directive> RendezvousThread::next() {
  const std::lock_guard lock(mutex_);
  if (directives_.empty()) return std::nullopt;
  Directive directive = std::move(directives_.front());
  directives_.pop_front();
  if (directives_.empty()) clear(ready_);
  return directive;
}

void RendezvousThread::finish(int code, const std::string& why) {
  post([this, code, why] {
    client_.leave();
    if (server_) server_->finish(code, why);
    over_ = true;
  });
  thread_.join();
}

void RendezvousThread::run() {
  try {
    while (!over_) poll();
  } catch (const std::exception& error) {
    deliver({{Directive::Kind::kEnd, {}, kExitFailure, one_line(error)}});
  }
}

// All under one lock: a round that is cancelled by the next directive never begins.
void RendezvousThread::deliver(std::vector<Directive> directives) {
  if (directives.empty()) return;
  const std::lock_guard lock(mutex_);
  for (Directive& directive : directives) directives_.push_back(std::move(directive));
  raise(ready_);
}

void RendezvousThread::poll() {
  std::vector<pollfd> polls{{wake_.get(), POLLIN, 0}};
  if (server_) server_->add_polls(polls);
  client_.add_polls(polls);
  ::poll(polls.data(), polls.size(), poll_ms_);
  clear(wake_);
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
  if (over_) return;
  if (server_) server_->poll();
  client_.poll();
  std::vector<Directive> directives;
  while (auto directive = client_.next()) directives.push_back(std::move(*directive));
  deliver(std::move(directives));
}

}  // namespace cohort::launch
