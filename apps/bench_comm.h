// SPDX-License-Identifier: Apache-2.0
// `cohort bench comm`: latency and bandwidth of collectives, by backend and size.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::apps {

/// What `cohort bench comm` measures, by flag.
class BenchComm {
 public:
  void add_to(CLI::App& app);
  /// Measures, on all ranks of `group`, and prints a table on rank 0. Collective; blocks.
  /// Errors: ConfigError if the limits leave no size that has a number for each rank.
  void run(const comm::ProcessGroup& group) const;

 private:
  // In bytes, from the smallest to the largest: one or more.
  std::vector<int64_t> sizes(int num_ranks) const;

  std::vector<std::string> backends_;  // empty: the group's own
  std::string operation_ = "all_reduce";
  int64_t min_bytes_ = int64_t{1} << 10;
  int64_t max_bytes_ = int64_t{256} << 20;
  int64_t factor_ = 4;
  int rounds_ = 5;
  bool registered_ = false;
  int64_t round_bytes_ = int64_t{256} << 20;
  bool copy_ = false;
  bool json_ = false;
};

}  // namespace cohort::apps
