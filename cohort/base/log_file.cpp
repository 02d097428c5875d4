// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/log_file.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <system_error>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort {

void prepare_log_file(const std::string& path) {
  std::error_code ignored;  // A folder that cannot be made shows in the error of open().
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) {
    throw ConfigError("log file " + path +
                      ": expected a writable file: " + std::generic_category().message(errno));
  }
  ::close(file);
}

}  // namespace cohort
