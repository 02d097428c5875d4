// SPDX-License-Identifier: Apache-2.0
// A parallel loop over the cores of a process.
#pragma once
#include <cstddef>
#include <functional>

namespace cohort::translate {

struct ParallelForOptions {
  size_t threads = 0;             ///< The caller's among them; 0: as many as there are cores.
  size_t taken = 64;              ///< Longest range.
  const char* name = "tokenise";  ///< Of the threads, at most 15 letters.
};

/// Calls `work` with ranges [begin, end) that make up [0, count), on all cores that the process may
/// use, the caller's thread among them; returns when all is done. A free thread takes the next
/// range, so a busy core delays no other.
///
/// Threads: `work` is called on several at once.
/// Errors:  the first that `work` threw, when all threads have ended; what is left then is not
/// done.
void parallel_for(size_t count, const std::function<void(size_t begin, size_t end)>& work,
                  const ParallelForOptions& options = {});

}  // namespace cohort::translate
