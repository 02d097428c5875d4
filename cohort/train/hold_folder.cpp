// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/hold_folder.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

namespace cohort::train {

Fd hold_folder(const std::string& flag, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  Fd held(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!held) {
    throw ConfigError(flag + " " + folder +
                      " cannot be made: " + (error ? error.message() : system_reason(errno)));
  }
  if (::flock(held.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw ConfigError(flag + " " + folder + ": another training is running in this folder");
  return held;
}

}  // namespace cohort::train
