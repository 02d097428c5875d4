// SPDX-License-Identifier: Apache-2.0
// A helper process that kills the workers of a launcher that was killed.
#pragma once
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// A small child process in its own session, which survives the launcher and then exits.
///
/// Every worker registers its session through a pipe before it executes its program. If the pipe
/// closes without a shutdown message, the launcher was killed, and the reaper sends SIGKILL to all
/// registered sessions (this reaches workers' children, which a parent-death signal does not).
/// Life: the destructor sends the shutdown message and waits for the reaper to exit.
/// Threads: none may exist when it is constructed (it forks, without exec).
class Reaper {
 public:
  /// Errors: std::system_error if the pipe or the process cannot be made.
  Reaper();
  ~Reaper();
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  /// Registers `session`. Async-signal-safe: a worker calls it between fork and exec.
  void track(pid_t session) const noexcept;
  /// Unregisters `session`, which has ended: its number may be reused by an unrelated process.
  void untrack(pid_t session) const noexcept;

 private:
  void send(pid_t message) const noexcept;

  Fd pipe_;
  pid_t pid_ = -1;
};

}  // namespace cohort::launch
