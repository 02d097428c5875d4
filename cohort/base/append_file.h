// SPDX-License-Identifier: Apache-2.0
// A file that only grows, record by record.
#pragma once
#include <string>
#include <string_view>
#include <sys/types.h>

#include "cohort/base/fd.h"

namespace cohort {

/// Appends whole records: a reader never finds half of one with another after it.
///
/// Threads: one caller at a time. One writer a file.
class AppendFile {
 public:
  enum class Open { kAny, kNew };  ///< kNew: it is an error if the file is there.

  /// Opens `path`, made if absent.
  /// Errors: ConfigError that names the file if it cannot be opened for writing.
  explicit AppendFile(const std::string& path, Open open = Open::kAny);

  const std::string& path() const { return path_; }

  /// Cuts the file to its first `length` bytes.
  /// Errors: ConfigError that names the file.
  void truncate(off_t length);

  /// Hands `record` to the system at once. The part that a full disk took is cut off again, so that
  /// a later call writes where this one began.
  /// Errors: c10::Error that names the file and gives the system's reason.
  void append(std::string_view record);

 private:
  std::string path_;
  Fd file_;
};

}  // namespace cohort
