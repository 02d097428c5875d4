// SPDX-License-Identifier: Apache-2.0
// The limits that Linux cgroups (version 1 or 2) set for a process.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>

namespace cohort {

/// Nothing: no limit.
struct CgroupLimits {
  std::optional<int64_t> memory_bytes;
  std::optional<double> cores;  ///< Seconds of processor time per second.
};

/// Returns the tightest limits of this process's group and the groups around it, as far as they can
/// be seen. Local. `root` stands for "/", for tests.
CgroupLimits cgroup_limits(const std::filesystem::path& root = "/");

}  // namespace cohort
