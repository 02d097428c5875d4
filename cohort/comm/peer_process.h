// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort::comm {

/// A process, and how to learn that it has ended (pidfd_open(2)).
class PeerProcess {
 public:
  /// Of no process that can be watched: is_watched() is false, has_ended() too.
  PeerProcess() = default;
  /// The process `pid` of this host and process namespace that began at `started`
  /// (process_stat's field 22). Before Linux 5.3 it cannot be watched.
  PeerProcess(pid_t pid, const std::string& started);

  bool is_watched() const { return is_watched_; }
  /// Whether it has ended, also while nobody has waited for it yet.
  bool has_ended() const;

 private:
  bool is_watched_ = false;
  bool had_ended_ = false;  // from the beginning
  Fd fd_;                   // none: this process, or one that had ended
};

}  // namespace cohort::comm
