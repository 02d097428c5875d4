// SPDX-License-Identifier: Apache-2.0
// What a process has once for a group of all ranks and its sub-groups. Not installed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "cohort/comm/collective_log.h"
#include "cohort/comm/device_calls.h"
#include "cohort/comm/failure_watch.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/rendezvous.h"

namespace cohort::comm {

/// This rank's part in its job.
///
/// Threads: the caller of collectives; `abort` from any.
struct Job {
  /// Local. Options of the environment replace those of `o`.
  /// Errors: ConfigError if the launcher allows no process group.
  Job(const RankInfo& i, const ProcessGroupOptions& o);

  /// Joins the rendezvous. Collective; blocks, at most `options.rendezvous_timeout`.
  void join();
  /// Starts to watch the other ranks, after `join`. Nothing in a job of one.
  void start_watch();
  /// Ends the threads of the watch; waits for a device that does not answer.
  void stop_watch();
  /// Ends all waiting in the backends of all groups.
  void abort();
  /// Makes `abort` know the backends of a group.
  void add(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  /// Makes the watch know what a group's devices do, as long as `calls` lives. Starts the thread that
  /// asks them.
  void add(const std::shared_ptr<DeviceCalls>& calls);
  /// Whether the watch has ended all waiting: the groups are dead. From any thread.
  bool is_aborted() const { return aborted_; }

  RankInfo info;  // complete after `join`
  const ProcessGroupOptions options;
  Rendezvous rendezvous;
  const std::shared_ptr<CollectiveLog> log;
  bool dead = false;
  std::string failed_call;  // The first that failed: "all_reduce(sum) #7"; empty: not known.

 private:
  std::vector<std::weak_ptr<DeviceCalls>> device_calls();
  void ask_devices(const std::stop_token& stop);
  std::vector<DeviceWait> device_waits();
  FlightRecord flight_record();

  std::mutex mutex_;
  std::condition_variable_any idle_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;  // guarded by mutex_
  std::vector<std::weak_ptr<DeviceCalls>> device_calls_;             // guarded by mutex_
  std::atomic<bool> aborted_ = false;
  int64_t looked_ns_ = 0;                             // the watching thread's
  std::vector<std::pair<int64_t, int64_t>> stopped_;  // the watching thread's; from, to
  std::jthread prober_;

 public:
  std::unique_ptr<FailureWatch> watch;  // last: its thread uses all the others
};

}  // namespace cohort::comm
