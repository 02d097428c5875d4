// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/free_memory.h"

#include <cstddef>
#include <malloc.h>

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

}  // namespace cohort
