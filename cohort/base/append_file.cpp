// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/append_file.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

namespace cohort {

AppendFile::AppendFile(const std::string& path, Open open)
    : path_(path),
      file_(::open(path.c_str(),
                   O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | (open == Open::kNew ? O_EXCL : 0),
                   0666)) {
  if (!file_) throw ConfigError(path + ": expected a writable file: " + system_reason(errno));
}

void AppendFile::truncate(off_t length) {
  if (::ftruncate(file_.get(), length) != 0)
    throw ConfigError(path_ + ": expected a writable file: " + system_reason(errno));
}

void AppendFile::append(std::string_view record) {
  const off_t whole = ::lseek(file_.get(), 0, SEEK_END);
  while (!record.empty()) {
    const ssize_t written = ::write(file_.get(), record.data(), record.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      const bool cut = whole >= 0 && ::ftruncate(file_.get(), whole) == 0;
      throw_without_stack(path_ + ": cannot write: " + system_reason(error) +
                          (cut ? "" : "; its last record may be half there"));
    }
    record.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace cohort
