// SPDX-License-Identifier: Apache-2.0
// Memory that was freed, and that the allocator keeps.
#pragma once

namespace cohort {

/// Releases the freed memory that the allocator keeps to the system, under jemalloc and glibc.
///
/// A program that keeps all of it (cmake/program_settings.cpp) fills it with holes as sizes change:
/// call this now and then, where a pause is. Costs the page faults of one training step.
void release_free_memory();

}  // namespace cohort
