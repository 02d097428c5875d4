// SPDX-License-Identifier: Apache-2.0
// The flags of every program for its rank, the rendezvous and the backend.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/comm/process_group.h"

namespace cohort::cli {

/// Rank info, group options and threads as flags.
struct GroupFlags {
  comm::RankInfoOptions rank_info;
  comm::ProcessGroupOptions group;
  double rendezvous_timeout_s = 300;
  double timeout_s = 600;
  int cpu_threads = 0;

  void add_to(CLI::App& app);
  /// Finds the rank, sets the threads and joins the rendezvous. Collective; blocks.
  /// Errors: ConfigError that names the flag or variable; PeerError for ranks that did not come.
  comm::ProcessGroup connect();
  /// The same without the other ranks: a group of this process alone, for a program that can do
  /// without them. Local.
  comm::ProcessGroup stay_alone() const;
};

}  // namespace cohort::cli
