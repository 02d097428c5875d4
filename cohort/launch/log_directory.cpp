// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/log_directory.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdlib.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::launch {

LogDirectory::LogDirectory(const std::string& requested) {
  if (!requested.empty()) {
    std::error_code error;
    std::filesystem::create_directories(requested, error);
    if (!std::filesystem::is_directory(requested)) {
      throw ConfigError("--log-dir " + requested + ": expected a folder that can be made, got " +
                        (error ? error.message() : "a file"));
    }
    path_ = std::filesystem::canonical(requested).string();
    return;
  }
  std::string name = env_string("TMPDIR").value_or("/tmp") + "/cohort-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    throw ConfigError(name + ": expected TMPDIR to be a folder that can be written, got " +
                      std::strerror(errno));
  }
  path_ = std::filesystem::canonical(name).string();
  temporary_ = true;
}

LogDirectory::~LogDirectory() {
  std::error_code ignored;
  if (temporary_) std::filesystem::remove_all(path_, ignored);
}

}  // namespace cohort::launch
