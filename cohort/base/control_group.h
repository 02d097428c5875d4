// What Linux's control groups (cgroups, version 1 or 2) leave a process of its machine.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>

namespace cohort {

/// Nothing: no limit.
struct ControlGroupLimits {
  std::optional<int64_t> memory_bytes;
  std::optional<double> cores;  ///< Seconds of processor time per second.
};

/// Returns the tightest limits of this process's group and the groups around it, as far as they can
/// be seen. Local. `root` stands for "/", for tests.
ControlGroupLimits control_group_limits(const std::filesystem::path& root = "/");

}  // namespace cohort
