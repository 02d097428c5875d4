// SPDX-License-Identifier: Apache-2.0
// What a process has once for a group of all ranks and its sub-groups. Not installed.
#pragma once
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/comm/collective_log.h"
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
  /// Starts to watch the other ranks, after `join`. Nothing in a group of one. `follows_next`:
  /// FailureWatch's, for backends of devices.
  void start_watch(bool follows_next);
  /// Ends all waiting in the backends of all groups.
  void abort();
  /// Makes `abort` know the backends of a group.
  void add(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  RankInfo info;  // complete after `join`
  const ProcessGroupOptions options;
  Rendezvous rendezvous;
  CollectiveLog log;
  bool dead = false;

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;  // guarded by mutex_
  bool aborted_ = false;                                             // guarded by mutex_

 public:
  std::unique_ptr<FailureWatch> watch;  // last: its thread uses all the others
};

}  // namespace cohort::comm
