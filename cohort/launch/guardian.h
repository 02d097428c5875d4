// The process that cleans up after a launcher that was killed.
#pragma once
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// A small child process in a session of its own that outlives the launcher by an instant.
///
/// Every worker announces its session through a pipe before it executes its program. If the pipe
/// ends without a farewell, the launcher was killed, and the guardian sends SIGKILL to all
/// announced sessions (this reaches workers' children, which a parent-death signal does not).
/// Life: the destructor says farewell and waits for the guardian to leave.
/// Threads: none may exist when it is constructed (it forks, without exec).
class Guardian {
 public:
  /// Errors: std::system_error if the pipe or the process cannot be made.
  Guardian();
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  /// Puts `session` under guard. Async-signal-safe: a worker calls it between fork and exec.
  void announce(pid_t session) const noexcept;
  /// Takes `session`, which has ended, from under guard: its number may go to a stranger.
  void forget(pid_t session) const noexcept;

 private:
  void tell(pid_t message) const noexcept;

  Fd to_guardian_;
  pid_t pid_ = -1;
};

}  // namespace cohort::launch
