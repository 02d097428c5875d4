// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/terminal.h"

#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <unistd.h>

#include "cohort/base/system_error.h"

namespace cohort::launch {
namespace {

// No more than POSIX's smallest PIPE_BUF: poll's "writable" promises room for that much.
constexpr size_t kPiece = 512;

}  // namespace

Terminal::Terminal(int fd) : fd_(fd), is_tty_(::isatty(fd) == 1) {}

void Terminal::write(std::string_view bytes) {
  if (bytes.empty() || gone_) return;
  at_line_start_ = bytes.back() == '\n';
  queue_.append(bytes);
  flush();
}

void Terminal::flush() {
  while (write_piece(0)) {
  }
}

void Terminal::flush_all() {
  while (write_piece(-1)) {
  }
}

bool Terminal::write_piece(int timeout_ms) {
  if (queue_.empty()) return false;
  pollfd ready{fd_, POLLOUT, 0};
  const int count = ::poll(&ready, 1, timeout_ms);
  if (count < 0 && errno == EINTR) return true;
  if (count <= 0) return false;
  const ssize_t size = ::write(fd_, queue_.data(), std::min(queue_.size(), kPiece));
  if (size < 0 && errno != EINTR && errno != EAGAIN) {
    gone_ = true;
    if (errno != EPIPE && errno != EIO) error_ = system_reason(errno);  // EIO: of a terminal.
    queue_.clear();
    return false;
  }
  if (size > 0) queue_.erase(0, static_cast<size_t>(size));
  return size > 0 || errno == EINTR;
}

}  // namespace cohort::launch
