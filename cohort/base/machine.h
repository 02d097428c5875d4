// SPDX-License-Identifier: Apache-2.0
// What the machine is that a process runs on.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/base/gpu_monitor.h"

namespace cohort {

struct Machine {
  std::string host;          ///< The kernel's name for it.
  std::string cpu;           ///< As the vendor names it; "" if the system does not say.
  int cores = 0;             ///< Logical ones that this process may run on.
  double core_limit = 0;     ///< Cores' worth of time that its cgroups grant; or `cores`.
  int64_t memory_bytes = 0;  ///< Of the machine, or as its cgroups limit it.
  std::vector<std::string> instructions;  ///< Of those that matter for products of matrices.
  std::vector<GpuUse> gpus;               ///< As GpuMonitor finds them now.
};

/// Asks the system (Linux). Local.
Machine this_machine();

}  // namespace cohort
