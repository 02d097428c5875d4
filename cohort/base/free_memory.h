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

/// Whether a program that does the same again and again, with sizes that vary, has come to keep so
/// much more memory that it is worth releasing.
class MemoryGrowth {
 public:
  /// Steps whose most memory is what later ones are compared with.
  static constexpr int kFirstSteps = 10;
  /// Call it once a step, at the same place, with private_resident_bytes(). True: a quarter more than
  /// in the first steps, and 256 MiB at least; then the next steps count as the first.
  bool has_grown(int64_t bytes);
  /// The next steps count as the first: memory was released in between.
  void restart() { *this = {}; }

 private:
  int steps_ = 0;
  int64_t most_ = 0;  // in the first steps
};

}  // namespace cohort
