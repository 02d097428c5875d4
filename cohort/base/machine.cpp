// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/machine.h"

#include <algorithm>
#include <array>
#include <climits>
#include <fstream>
#include <map>
#include <sched.h>
#include <sstream>
#include <unistd.h>

#include "cohort/base/cgroup.h"

namespace cohort {
namespace {

// x86's and Arm's, by the names in /proc/cpuinfo.
constexpr std::array kInstructions = {
    "avx",      "avx2",  "fma",     "f16c",    "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16",
    "amx_int8", "asimd", "asimdhp", "asimddp", "sve",     "sve2",        "bf16",        "avx_vnni"};

// The first processor's entries of /proc/cpuinfo.
std::map<std::string, std::string> first_processor() {
  std::map<std::string, std::string> entries;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t key_end = line.find_last_not_of(" \t", colon - 1);
    const size_t value = line.find_first_not_of(' ', colon + 1);
    entries[line.substr(0, key_end + 1)] = value == std::string::npos ? "" : line.substr(value);
  }
  return entries;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

int64_t usable_memory(const CgroupLimits& limits) {
  const int64_t all = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGE_SIZE);
  return std::min(all, limits.memory_bytes.value_or(all));
}

}  // namespace

Machine this_machine() {
  Machine machine;
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), host.size() - 1);
  machine.host = host.data();
  auto processor = first_processor();
  machine.cpu = processor["model name"];
  const CgroupLimits limits = cgroup_limits();
  machine.cores = usable_cores();
  machine.core_limit = limits.cores.value_or(machine.cores);
  machine.memory_bytes = usable_memory(limits);
  std::istringstream flags(processor["flags"] + processor["Features"]);
  for (std::string flag; flags >> flag;) {
    if (std::find(kInstructions.begin(), kInstructions.end(), flag) != kInstructions.end())
      machine.instructions.push_back(flag);
  }
  machine.gpus = GpuMonitor().sample();
  return machine;
}

}  // namespace cohort
