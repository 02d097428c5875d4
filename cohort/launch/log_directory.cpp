// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/log_directory.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <stdlib.h>
#include <sys/file.h>
#include <system_error>
#include <unistd.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::launch {

LogDirectory::LogDirectory(const std::string& requested, LogSharing sharing) {
  if (!requested.empty()) {
    std::error_code error, ignored;
    std::filesystem::create_directories(requested, error);
    if (!std::filesystem::is_directory(requested, ignored)) {
      throw ConfigError("--log-dir " + requested + ": expected a folder that can be made, got " +
                        (error ? error.message() : "a file"));
    }
    path_ = std::filesystem::canonical(requested, error).string();
    if (error) {
      throw ConfigError("--log-dir " + requested + ": expected a folder that can be reached, got " +
                        error.message());
    }
    lock(sharing);
    return;
  }
  std::string name = env_string("TMPDIR").value_or("/tmp") + "/cohort-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    throw ConfigError(name + ": expected TMPDIR to be a folder that can be written, got " +
                      std::strerror(errno));
  }
  std::error_code error;
  path_ = std::filesystem::canonical(name, error).string();
  if (error) {
    ::rmdir(name.c_str());
    throw ConfigError(name + ": expected TMPDIR to be a folder that can be reached, got " +
                      error.message());
  }
  temporary_ = true;
}

LogDirectory::~LogDirectory() {
  std::error_code ignored;
  if (temporary_) std::filesystem::remove_all(path_, ignored);
}

// On the folder itself, so that no file of its own lies among the logs.
void LogDirectory::lock(LogSharing sharing) {
  lock_ = Fd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int kind = sharing == LogSharing::kOneLauncher ? LOCK_EX : LOCK_SH;
  if (::flock(lock_.get(), kind | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw ConfigError(
        "--log-dir " + path_ +
        ": expected a folder without a running job, got that of another `cohort run`; "
        "give each job a folder of its own");
  }
}

}  // namespace cohort::launch
