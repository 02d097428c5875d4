// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/free_memory.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <malloc.h>
#include <unistd.h>

// Only programs link jemalloc: without it this is null.
extern "C" [[gnu::weak]] int mallctl(const char* name, void* old_value, size_t* old_size,
                                     void* new_value, size_t new_size);

namespace cohort {

void release_free_memory() {
  if (mallctl != nullptr) {
    mallctl("arena.4096.purge", nullptr, nullptr, nullptr, 0);  // 4096: of all arenas
  } else {
    malloc_trim(0);
  }
}

int64_t private_resident_bytes() {
  int64_t mapped = 0, resident = 0, shared = 0;
  std::ifstream("/proc/self/statm") >> mapped >> resident >> shared;
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

bool MemoryGrowth::has_grown(int64_t bytes) {
  constexpr int64_t kLeast = int64_t{256} << 20;
  if (steps_ < kFirstSteps) {
    ++steps_;
    most_ = std::max(most_, bytes);
    return false;
  }
  if (bytes <= most_ + std::max(most_ / 4, kLeast)) return false;
  restart();
  return true;
}

}  // namespace cohort
