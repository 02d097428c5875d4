// SPDX-License-Identifier: Apache-2.0
// How much memory this process has.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

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

/// Of `memory`, which begins at a page, in bytes; whole pages count. Unlike the process's sum it does
/// not change with what else is allocated.
inline int64_t resident_bytes(std::span<std::byte> memory) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((memory.size() + page - 1) / page);
  if (::mincore(memory.data(), memory.size(), resident.data()) != 0)
    throw std::runtime_error("mincore failed");
  const auto is_resident = [](unsigned char state) { return (state & 1) != 0; };
  return std::count_if(resident.begin(), resident.end(), is_resident) * static_cast<int64_t>(page);
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
