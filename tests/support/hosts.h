// SPDX-License-Identifier: Apache-2.0
// Ranks of one machine that count as ranks of several hosts.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <unistd.h>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::test {

/// Gives `body` another group of all ranks of `group`, in which rank r runs on host `hosts[r]`.
inline void on_hosts(const comm::ProcessGroup& group, const std::vector<std::string>& hosts,
                     const std::function<void(const comm::ProcessGroup&)>& body,
                     const comm::ProcessGroupOptions& options = {}) {
  const std::string store = group.broadcast_object(
      (std::filesystem::temp_directory_path() / ("cohort-hosts-" + std::to_string(getpid())))
          .string());
  setenv("COHORT_HOST_NAME", hosts.at(static_cast<size_t>(group.rank())).c_str(), 1);
  const comm::ProcessGroup ranks(
      {.rank = group.rank(), .world_size = group.size(), .finds_host = true, .store_file = store},
      options);
  unsetenv("COHORT_HOST_NAME");
  body(ranks);
  ranks.close();
  group.barrier("all have left the file");
  if (group.rank() == 0) std::filesystem::remove(store);
}

}  // namespace cohort::test
