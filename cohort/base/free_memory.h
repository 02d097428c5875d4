// SPDX-License-Identifier: Apache-2.0
// Memory that was freed, and that the allocator keeps.
#pragma once
#include <cstdint>

namespace cohort {

/// Releases the freed memory that the allocator keeps to the system, under jemalloc and glibc.
///
/// A program that keeps all of it (cmake/program_settings.cpp) fills it with holes as sizes change:
/// call this when MemoryGrowth says so, where a pause is. Costs the page faults of one training step.
void release_free_memory();

/// Returns the bytes of this process's private memory that are in RAM, without files and shared
/// memory; 0 if the system does not say.
int64_t private_resident_bytes();

/// Whether a program that does the same again and again, with sizes that vary, has come to need so
/// much more memory that holes must be the reason.
class MemoryGrowth {
 public:
  /// Call it once a step, at the same place, with private_resident_bytes(). The first step is what
  /// later ones are compared with. True: a quarter more, and 256 MiB at least; then the next step
  /// counts as the first.
  bool has_grown(int64_t bytes);
  /// The next step counts as the first: memory was released in between.
  void restart() { first_ = 0; }

 private:
  int64_t first_ = 0;
};

}  // namespace cohort
