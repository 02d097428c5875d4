// SPDX-License-Identifier: Apache-2.0
// How much memory this process has.
#pragma once
#include <cstdint>
#include <fstream>
#include <sstream>
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

/// Of memory for which huge pages were asked (MADV_HUGEPAGE), what is in them.
inline int64_t huge_bytes() {
  std::ifstream file("/proc/self/smaps");
  int64_t kib = 0, sum = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "AnonHugePages:") words >> kib;
    if (word == "VmFlags:" && (line + " ").find(" hg ") != line.npos) sum += kib * 1024;
  }
  return sum;
}

}  // namespace cohort::test
