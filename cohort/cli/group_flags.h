// The flags by which every program finds its place among the ranks and meets the others.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/comm/process_group.h"

namespace cohort::cli {

/// The rank's place and waits as flags.
struct GroupFlags {
  comm::PlaceOptions place;
  comm::GroupOptions group;
  double rendezvous_timeout_s = 300;
  double timeout_s = 600;
  int cpu_threads = 0;

  void add_to(CLI::App& app);
  /// Finds the place, sets the threads and meets the other ranks. Collective; blocks.
  /// Errors: ConfigError that names the flag or variable; PeerError for ranks that did not come.
  comm::ProcessGroup connect();
  /// The same without the other ranks: a group of this process alone, for a program that can do
  /// without them. Local.
  comm::ProcessGroup stay_alone();
};

}  // namespace cohort::cli
