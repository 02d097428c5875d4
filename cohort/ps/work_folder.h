// SPDX-License-Identifier: Apache-2.0
// A folder for files that are needed for a while.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace cohort::ps {

/// A new folder in `parent`, which is made if it is not there. Both are removed at the end; `parent`
/// only if it was made and is empty.
class WorkFolder {
 public:
  /// Errors: c10::Error that names the folder and the system's reason.
  explicit WorkFolder(const std::string& parent);
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::filesystem::path> made_;
};

}  // namespace cohort::ps
