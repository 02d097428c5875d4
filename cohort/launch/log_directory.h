// SPDX-License-Identifier: Apache-2.0
// The folder that holds the workers' logs and error files.
#pragma once
#include <string>

namespace cohort::launch {

/// A folder that exists from construction on, under an absolute path.
class LogDirectory {
 public:
  /// Takes `requested` (made if missing), or if that is empty makes a fresh folder under TMPDIR.
  /// Errors: ConfigError that names the path.
  explicit LogDirectory(const std::string& requested);
  /// Removes a fresh folder unless keep() was called; a requested one always stays.
  ~LogDirectory();
  LogDirectory(const LogDirectory&) = delete;
  LogDirectory& operator=(const LogDirectory&) = delete;

  const std::string& path() const { return path_; }
  void keep() { temporary_ = false; }
  bool stays() const { return !temporary_; }  ///< When this ends.

 private:
  std::string path_;
  bool temporary_ = false;
};

}  // namespace cohort::launch
