// SPDX-License-Identifier: Apache-2.0
// How much memory this process has.
#pragma once
#include <cstdint>
#include <fstream>
#include <string>
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

/// Of memory without a file in huge pages.
inline int64_t huge_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    if (int64_t kib = 0; word == "AnonHugePages:" && file >> kib) return kib * 1024;
  }
  return 0;
}

}  // namespace cohort::test
