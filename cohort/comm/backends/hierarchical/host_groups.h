// SPDX-License-Identifier: Apache-2.0
// Which ranks of a group share memory.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::comm {

/// Ranks that share memory, in their order. The first one leads.
using HostGroup = std::vector<int>;

/// Divides the ranks of a group, in the order of the leaders. `memory`: BackendRequest's. A rank
/// without one is alone; more than kMostShmRanks that share memory are several groups.
std::vector<HostGroup> host_groups(const std::vector<std::string>& memory);

/// Ranks first, first + 1, ..., first + count - 1, all of one of the groups.
struct HostRun {
  int host = 0;  ///< Index of the group.
  int first = 0;
  int count = 0;
};

/// Divides all ranks, in their order, into runs as long as can be.
std::vector<HostRun> host_runs(const std::vector<HostGroup>& groups);

}  // namespace cohort::comm
