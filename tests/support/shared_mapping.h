// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace cohort::test {

/// Where the memory begins that the ranks of a group over shm share and in which `tensor` lies; null
/// if it lies in none.
inline const void* shared_mapping_of(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:cohort-shm") == std::string::npos) continue;
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (address >= begin && address < end) return reinterpret_cast<const void*>(begin);
  }
  return nullptr;
}

}  // namespace cohort::test
