// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/job.h"

#include <algorithm>
#include <csignal>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/shm_backend.h"

namespace cohort::comm {
namespace {

constexpr std::array<const char*, 3> kChecks{"off", "on", "always"};
constexpr std::chrono::milliseconds kAskInterval{100};
// Between two looks of the watch, which come every two seconds or more often.
constexpr int64_t kLongestLookNs = 4'000'000'000;

ProcessGroupOptions with_environment(ProcessGroupOptions options) {
  if (const auto check = env_int("COHORT_CHECK_COLLECTIVES", 0, 2))
    options.check_collectives = static_cast<CheckCollectives>(*check);
  return options;
}

std::string terms(const RankInfo& info, const ProcessGroupOptions& options) {
  return "world size " + std::to_string(info.world_size) + ", backend " + options.backend +
         ", check_collectives " + kChecks[static_cast<size_t>(options.check_collectives)];
}

// A launcher whose ranks restart, or are lost, one by one says so.
void check_job_has_groups() {
  if (env_string("COHORT_PROCESS_GROUP").value_or("") != "none") return;
  throw ConfigError(
      "COHORT_PROCESS_GROUP=none: --restart-policy single and --on-trainer-loss continue are for "
      "trainers of servers without a process group, which this program has: expected "
      "--restart-policy group, and no --on-trainer-loss continue");
}

void do_nothing(int) {}

// Backends and stores write to sockets whose other end may be gone. The error of that write names
// the lost rank; a signal would end the process before. Programs that this one starts do not
// inherit a handler, unlike SIG_IGN.
void outlive_broken_pipes() {
  struct sigaction action {};
  sigaction(SIGPIPE, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = do_nothing;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
}

// The group is dead: of a backend that cannot be aborted the timeout remains. That of a device may
// wait for the device: the host's goes first.
void abort_backends(c10d::ProcessGroup& group) {
  auto devices = group.getDeviceTypes();
  std::ranges::stable_partition(devices, [](const at::Device& device) { return device.is_cpu(); });
  for (const at::Device& device : devices) {
    try {
      group.getBackend(device.type())->abort();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    }
  }
}

}  // namespace

Job::Job(const RankInfo& i, const ProcessGroupOptions& o)
    : info(i),
      options(with_environment(o)),
      log(std::make_shared<CollectiveLog>(
          i.rank, i.world_size, RankTrace::open(env_string(kTraceFileVariable).value_or("")))) {
  if (info.world_size == 1) return;
  check_job_has_groups();
  outlive_broken_pipes();
}

void Job::join() {
  if (info.world_size == 1) {
    rendezvous.store = c10::make_intrusive<c10d::HashStore>();
    rendezvous.address = "127.0.0.1";
    rendezvous.hosts = {own_host()};
    rendezvous.memory_sharing = {memory_sharing()};
    rendezvous.cores = {cores_of(getpid())};
  } else {
    rendezvous = join_rendezvous(info, {.timeout = options.rendezvous_timeout,
                                        .interface = options.interface,
                                        .terms = terms(info, options)});
  }
  if (info.finds_host) find_host(info, rendezvous.hosts);
}

void Job::start_watch() {
  if (info.world_size == 1) return;
  const bool rank_0_hosts = info.store_file.empty() && !info.agent_store;
  looked_ns_ = steady_now_ns();
  watch = std::make_unique<FailureWatch>(
      std::move(rendezvous.watch), info.rank, info.world_size, rank_0_hosts,
      FailureWatchCalls{.flight_record = [this] { return flight_record(); },
                        .waiting_ns = [this] { return log->waiting_ns(); },
                        .device_waits = [this] { return device_waits(); },
                        .has_ended =
                            [this](int rank) {
                              return rendezvous.processes[static_cast<size_t>(rank)].has_ended();
                            },
                        .abort = [this] { abort(); }});
}

void Job::stop_watch() {
  watch.reset();
  prober_ = {};
}

// What aborts a backend may take long, so nobody waits for it at the lock.
void Job::add(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const bool is_dead = [&] {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& each) { return each.expired(); });
    groups_.emplace_back(group);
    return aborted_.load();
  }();
  if (is_dead) abort_backends(*group);
}

void Job::add(const std::shared_ptr<DeviceCalls>& calls) {
  const std::lock_guard lock(mutex_);
  std::erase_if(device_calls_, [](const auto& each) { return each.expired(); });
  device_calls_.emplace_back(calls);
  if (prober_.joinable()) return;
  prober_ = std::jthread([this](const std::stop_token& stop) { ask_devices(stop); });
  pthread_setname_np(prober_.native_handle(), "cohort-device");
}

std::vector<std::weak_ptr<DeviceCalls>> Job::device_calls() {
  const std::lock_guard lock(mutex_);
  return device_calls_;
}

// On a thread of its own: a query may block for as long as another thread holds the driver's lock. The
// call that is asked about then only grows older.
void Job::ask_devices(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    for (const auto& each : device_calls()) {
      if (const auto calls = each.lock()) calls->forget_ended();
    }
    std::unique_lock lock(mutex_);
    idle_.wait_for(lock, stop, kAskInterval, [] { return false; });
  }
}

// A job that was stopped, and resumes, has not waited meanwhile.
std::vector<DeviceWait> Job::device_waits() {
  const int64_t last = std::exchange(looked_ns_, steady_now_ns());
  if (looked_ns_ - last > kLongestLookNs) stopped_.emplace_back(last + kLongestLookNs, looked_ns_);
  std::vector<DeviceWait> waits;
  for (const auto& each : device_calls()) {
    const auto calls = each.lock();
    auto wait = calls ? calls->oldest() : std::nullopt;
    if (!wait) continue;
    const int64_t since_ns = steady_now_ns() - wait->ms * 1'000'000;
    for (const auto& [from, to] : stopped_)
      wait->ms -= std::max<int64_t>(to - std::max(from, since_ns), 0) / 1'000'000;
    waits.push_back(std::move(*wait));
  }
  if (waits.empty()) stopped_.clear();
  return waits;
}

FlightRecord Job::flight_record() {
  FlightRecord record = log->flight_record();
  record.device_waits = device_waits();
  std::erase_if(record.device_waits, [](const DeviceWait& wait) { return !wait.is_stuck(); });
  return record;
}

void Job::abort() {
  const auto groups = [this] {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    return groups_;
  }();
  for (const auto& entry : groups) {
    if (const auto group = entry.lock()) abort_backends(*group);
  }
}

}  // namespace cohort::comm
