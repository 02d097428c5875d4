// The allocator's settings for programs that allocate and free the same large tensors every step.
#pragma once

namespace cohort {

/// Makes malloc keep freed memory: no block is mapped alone, none given back to the system.
///
/// For the outermost frame of a program, before the first tensor. Costs peak memory, saves the page faults of
/// every step. Does nothing where the C library has no such settings.
void keep_freed_memory();

}  // namespace cohort
