// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Version 1 writes "no limit" as the greatest multiple of a page.
constexpr int64_t kNoMemoryLimit = int64_t{1} << 60;

std::optional<double> first_number(const fs::path& file) {
  double number = 0;
  if (std::ifstream(file) >> number && number > 0) return number;
  return {};
}

std::optional<double> cores_of_version_2(const fs::path& group) {
  double quota = 0, period = 0;  // A file that begins with "max" has no number there.
  if (std::ifstream(group / "cpu.max") >> quota >> period && quota > 0 && period > 0)
    return quota / period;
  return {};
}

std::optional<double> cores_of_version_1(const fs::path& group) {
  const auto quota = first_number(group / "cpu.cfs_quota_us");  // Below 0: none.
  const auto period = first_number(group / "cpu.cfs_period_us");
  if (quota && period) return *quota / *period;
  return {};
}

template <class T>
void tighten(std::optional<T>& limit, std::optional<T> other) {
  if (other && (!limit || *other < *limit)) limit = other;
}

void add_memory(const fs::path& file, CgroupLimits& limits) {
  const auto bytes = first_number(file);
  if (bytes && *bytes < static_cast<double>(kNoMemoryLimit))
    tighten(limits.memory_bytes, std::optional(static_cast<int64_t>(*bytes)));
}

// Of a group in one hierarchy: in version 2 there is one, which has no controllers' names, and in
// version 1 one for each controller, or for some of them.
void add_group(const fs::path& hierarchies, const std::string& controllers, const fs::path& group,
               CgroupLimits& limits) {
  const auto has = [&](const std::string& controller) {
    return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
  };
  if (controllers.empty()) {
    add_memory(hierarchies / group / "memory.max", limits);
    tighten(limits.cores, cores_of_version_2(hierarchies / group));
  }
  if (has("memory")) add_memory(hierarchies / "memory" / group / "memory.limit_in_bytes", limits);
  if (has("cpu")) tighten(limits.cores, cores_of_version_1(hierarchies / "cpu" / group));
}

}  // namespace

CgroupLimits cgroup_limits(const fs::path& root) {
  CgroupLimits limits;
  std::ifstream groups(root / "proc/self/cgroup");
  // "4:memory:/a/b", in version 2 "0::/a/b". Inside a container a path may be one that is not to be
  // seen there; the outermost group always is.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    for (bool outermost = false; !outermost; group = group.parent_path()) {
      outermost = group.empty();
      add_group(root / "sys/fs/cgroup", controllers, group, limits);
    }
  }
  return limits;
}

}  // namespace cohort
