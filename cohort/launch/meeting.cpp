#include "cohort/launch/meeting.h"

#include <cerrno>
#include <cstdint>
#include <poll.h>
#include <sys/eventfd.h>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/program.h"

namespace cohort::launch {
namespace {

constexpr int kTurnMs = 250;  // Between two attempts to connect.

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

std::optional<Coordinator> host(const RunOptions& options) {
  const Endpoint endpoint = parse_endpoint(options.rdzv_endpoint);
  std::optional<Coordinator> coordinator;
  if (auto listener = listen_if_local(endpoint))
    coordinator.emplace(std::move(*listener), endpoint.host, options);
  return coordinator;
}

}  // namespace

Meeting::Meeting(const RunOptions& options)
    : coordinator_(host(options)),
      hosts_(coordinator_.has_value()),
      member_(parse_endpoint(options.rdzv_endpoint), options),
      wake_(make_event()),
      news_(make_event()),
      thread_([this] { live(); }) {}

Meeting::~Meeting() {
  if (!thread_.joinable()) return;
  post([this] {
    member_.leave();
    over_ = true;
  });
  thread_.join();
}

void Meeting::post(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  raise(wake_);
}

void Meeting::join(int store_port) {
  post([this, store_port] { member_.join(store_port); });
}

void Meeting::tell_done(int code) {
  post([this, code] { member_.tell_done(code); });
}

void Meeting::tell_failed(const Verdict& verdict, const std::string& why) {
  post([this, verdict, why] { member_.tell_failed(verdict, why); });
}

std::optional<Order> Meeting::next() {
  const std::lock_guard lock(mutex_);
  if (orders_.empty()) return std::nullopt;
  Order order = std::move(orders_.front());
  orders_.pop_front();
  if (orders_.empty()) clear(news_);
  return order;
}

void Meeting::finish(int code, const std::string& why) {
  post([this, code, why] {
    member_.leave();
    if (coordinator_) coordinator_->finish(code, why);
    over_ = true;
  });
  thread_.join();
}

void Meeting::live() {
  try {
    while (!over_) turn();
  } catch (const std::exception& error) {
    give({{Order::Kind::kEnd, {}, kExitFailure, one_line(error)}});
  }
}

// All at once: a round that was called off in the same breath is never begun.
void Meeting::give(std::vector<Order> orders) {
  if (orders.empty()) return;
  const std::lock_guard lock(mutex_);
  for (Order& order : orders) orders_.push_back(std::move(order));
  raise(news_);
}

void Meeting::turn() {
  std::vector<pollfd> polls{{wake_.get(), POLLIN, 0}};
  if (coordinator_) coordinator_->add_polls(polls);
  member_.add_polls(polls);
  ::poll(polls.data(), polls.size(), kTurnMs);
  clear(wake_);
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
  if (over_) return;
  if (coordinator_) coordinator_->turn();
  member_.turn();
  std::vector<Order> orders;
  while (auto order = member_.next()) orders.push_back(std::move(*order));
  give(std::move(orders));
}

}  // namespace cohort::launch
