// SPDX-License-Identifier: Apache-2.0
// How much memory this process has.
#pragma once
#include <cstdint>
#include <fstream>
#include <unistd.h>

namespace cohort::test {

/// In bytes.
struct ProcessMemory {
  int64_t mapped = 0;
  int64_t resident = 0;
};

inline ProcessMemory process_memory() {
  ProcessMemory pages;
  std::ifstream("/proc/self/statm") >> pages.mapped >> pages.resident;
  const int64_t bytes = ::sysconf(_SC_PAGESIZE);
  return {.mapped = pages.mapped * bytes, .resident = pages.resident * bytes};
}

inline int64_t resident_bytes() {
  return process_memory().resident;
}

}  // namespace cohort::test
