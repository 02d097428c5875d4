// SPDX-License-Identifier: Apache-2.0
// Work on the process's memory of this moment, in a child process.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort::ps {

/// Runs a function in a forked child, which sees the memory as of the fork while the parent
/// continues. The child has one thread, none of the parent's descriptors, and dies with it.
///
/// The function must not touch what other threads may hold locked at the fork: sockets, logs.
/// Threads: made and polled by one thread, which must live as long as the child.
class ForkedTask {
 public:
  /// Forks. `poll` calls `done` with "", or with the error of `work` or of the child. A process
  /// that ignores SIGCHLD never learns that a child succeeded.
  /// Errors: c10::Error with the system's reason if there is no child.
  ForkedTask(const std::function<void()>& work, std::function<void(std::string)> done);
  /// Kills the child if it is not done.
  ~ForkedTask();
  ForkedTask(const ForkedTask&) = delete;
  ForkedTask& operator=(const ForkedTask&) = delete;

  /// Returns whether the child has ended; calls `done` when it sees that first. Does not block.
  bool poll();
  /// How many bytes the child has written to files; 0 if that cannot be learnt.
  uint64_t written_bytes() const;

 private:
  pid_t child_ = -1;
  Fd error_pipe_;  // The child writes its error to it.
  std::function<void(std::string)> done_;
};

}  // namespace cohort::ps
