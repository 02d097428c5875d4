// SPDX-License-Identifier: Apache-2.0
// The flags of every program for its rank, the rendezvous and the backend.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::cli {

/// Rank info, group options and threads as flags.
struct GroupFlags {
  /// Where the program's tensors may be. kCpu: it has no flag --device.
  enum class Devices { kCpu, kAny };

  comm::RankInfoOptions rank_info;
  comm::ProcessGroupOptions group;
  std::string device = "cpu";  ///< "cpu", "cuda", "cuda:N": comm::init_accelerator.
  /// CUDA devices, by local rank, instead of `device`, as Marian's --devices. Empty: not given.
  std::vector<int> devices;
  bool allow_tf32 = false;            ///< As torch's allow_tf32 of CUDA's products.
  std::string backend = "auto";       ///< As ProcessGroupOptions::backend.
  double rendezvous_timeout_s = 300;  ///< Above 0 and below 1e7, as timeout_s.
  double timeout_s = 600;
  int cpu_threads = 0;

  void add_to(CLI::App& app, Devices allowed = Devices::kCpu);
  /// Whether neither --device nor --devices names another.
  bool computes_on_cpu() const { return device == "cpu" && devices.empty(); }
  /// Finds the rank and its device, which the group's device() is then, sets the threads and joins
  /// the rendezvous. Collective; blocks.
  /// Errors: ConfigError that names the flag or variable; PeerError for ranks that did not come.
  comm::ProcessGroup connect();
  /// The same without the other ranks: a group of this process alone, for a program that can do
  /// without them. Local.
  /// Errors: ConfigError for flags of a group, such as --rank or --timeout.
  comm::ProcessGroup stay_alone();

 private:
  void choose_device(const comm::RankInfo& info);
};

/// Checks that each rank computes on a card of its own. `card` is what distinguishes this rank's
/// from the others of its host, as comm::card_uuid(); empty: not known, which nothing is held
/// against. Collective; blocks.
/// Errors: ConfigError on all ranks that names two on one card.
void check_cards_differ(const comm::ProcessGroup& group, const std::string& card);

/// Checks that all ranks were started with the same flags of `command`, as they were written. Ranks
/// of several hosts may give different paths, if all of them give one. The flags of GroupFlags,
/// those of security and `own_flags`, by their long names, may differ. Positional arguments are not compared.
/// Collective; blocks.
/// Errors: ConfigError on all ranks that names a flag and two ranks' values.
void check_same_flags(const comm::ProcessGroup& group, const CLI::App& command,
                      const std::vector<std::string>& own_flags = {});

}  // namespace cohort::cli
