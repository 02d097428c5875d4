// SPDX-License-Identifier: Apache-2.0
// The folder that holds the workers' logs and error files.
#pragma once
#include <string>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// How many launchers write to a folder that a user named.
enum class LogSharing {
  kOneLauncher,   ///< A job of one node: nobody else.
  kSeveralNodes,  ///< A node of a job of several: other launchers, with other ranks.
};

/// A folder that exists from construction on, under an absolute path.
class LogDirectory {
 public:
  /// Takes `requested` (made if missing), or if that is empty makes a fresh folder under TMPDIR.
  ///
  /// A requested folder is locked (flock) while this lives, and with it while this process does: two
  /// launchers share one only if both are kSeveralNodes; whether their jobs are the same is not
  /// checked. Where the file system has no locks, as some networks', nothing is refused.
  /// Errors: ConfigError that names the path, also where another launcher has it.
  explicit LogDirectory(const std::string& requested,
                        LogSharing sharing = LogSharing::kOneLauncher);
  /// Removes a fresh folder unless keep() was called; a requested one always stays.
  ~LogDirectory();
  LogDirectory(const LogDirectory&) = delete;
  LogDirectory& operator=(const LogDirectory&) = delete;

  /// Removes the logs, error files and traces of the ranks from `rank` on, which an earlier job
  /// left; no other file.
  /// Errors: ConfigError that names one which cannot be removed.
  void remove_ranks_from(int rank) const;

  const std::string& path() const { return path_; }
  void keep() { temporary_ = false; }
  bool stays() const { return !temporary_; }  ///< When this ends.

 private:
  void lock(LogSharing sharing);

  std::string path_;
  Fd lock_;  // The folder, if it was requested.
  bool temporary_ = false;
};

}  // namespace cohort::launch
