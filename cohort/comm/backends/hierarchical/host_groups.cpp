// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/hierarchical/host_groups.h"

#include <algorithm>
#include <map>

#include "cohort/comm/backends/shm/shm_backend.h"

namespace cohort::comm {

std::vector<HostGroup> host_groups(const std::vector<std::string>& memory) {
  std::vector<HostGroup> groups;
  std::map<std::string, size_t> open;  // the group that takes more ranks
  for (int rank = 0; rank < std::ssize(memory); ++rank) {
    const std::string& own = memory[static_cast<size_t>(rank)];
    const auto found = open.find(own);
    if (!own.empty() && found != open.end() && std::ssize(groups[found->second]) < kMostShmRanks) {
      groups[found->second].push_back(rank);
      continue;
    }
    open[own] = groups.size();
    groups.push_back({rank});
  }
  return groups;
}

std::vector<HostRun> host_runs(const std::vector<HostGroup>& groups) {
  std::vector<std::pair<int, int>> hosts;  // of each rank: rank, index of the group
  for (int host = 0; host < std::ssize(groups); ++host) {
    for (const int rank : groups[static_cast<size_t>(host)]) hosts.emplace_back(rank, host);
  }
  std::ranges::sort(hosts);
  std::vector<HostRun> runs;
  for (const auto& [rank, host] : hosts) {
    if (runs.empty() || runs.back().host != host) runs.push_back({.host = host, .first = rank});
    ++runs.back().count;
  }
  return runs;
}

}  // namespace cohort::comm
