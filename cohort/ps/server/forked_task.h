// Work on a process's memory as it is now, beside the process.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort::ps {

/// Runs a function in a forked child: what it reads stays as it was, page by page, while the parent
/// goes on. The child has one thread, none of the parent's descriptors, and dies with it.
///
/// The function must not touch what other threads may hold locked at the fork: sockets, logs.
/// Threads: made and polled by one thread, which must live as long as the child.
class ForkedTask {
 public:
  /// Forks. `done` gets "", or what `work` threw or else befell the child, from `poll`. A process
  /// that ignores SIGCHLD never learns that a child ended well.
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
  Fd words_;  // What the child says of its failure.
  std::function<void(std::string)> done_;
};

}  // namespace cohort::ps
