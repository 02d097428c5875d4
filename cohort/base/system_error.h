// SPDX-License-Identifier: Apache-2.0
// What the system says of a call that failed.
#pragma once
#include <cerrno>
#include <string>
#include <system_error>

namespace cohort {

/// Returns the system's text for an errno, such as "No space left on device".
inline std::string system_reason(int error) {
  return std::generic_category().message(error);
}

/// Returns whether a file could have been made under another path: a full disk is no fault of the
/// path.
inline bool is_of_the_path(int error) {
  return error == ENOENT || error == ENOTDIR || error == EISDIR || error == EACCES ||
         error == EPERM || error == EROFS || error == ELOOP || error == ENAMETOOLONG;
}

}  // namespace cohort
