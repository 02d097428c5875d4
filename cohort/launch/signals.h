// SPDX-License-Identifier: Apache-2.0
// Signals as data: what would interrupt the launcher becomes something to read.
#pragma once
#include <optional>
#include <signal.h>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// Sent to the launcher, it prints the state of every rank. (SIGRTMIN is a function, hence this.)
inline int table_signal() {
  return SIGRTMIN + 5;
}

/// Blocks the signals that the launcher handles and returns them one by one.
/// Handled: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGWINCH, SIGCHLD,
/// table_signal(). One that was ignored when the launcher began (nohup, a shell's background job)
/// stays ignored. SIGPIPE is ignored meanwhile. The destructor puts the process back as it was.
class Signals {
 public:
  /// Errors: std::system_error if the descriptor cannot be made.
  Signals();
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  /// Readable while a signal waits.
  int fd() const { return fd_.get(); }
  /// Returns the next waiting signal, if any; never blocks.
  std::optional<int> next() const;
  /// Lets signals act as they did before the constructor; SIGPIPE stays ignored.
  void unblock() const noexcept;
  /// Undoes the constructor. Async-signal-safe: a worker calls it between fork and exec.
  void restore() const noexcept;

 private:
  Fd fd_;
  sigset_t old_mask_{};
  struct sigaction old_pipe_ {};
  struct sigaction old_child_ {};
};

}  // namespace cohort::launch
