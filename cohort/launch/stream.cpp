// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/stream.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <system_error>
#include <termios.h>

namespace cohort::launch {
namespace {

constexpr size_t kLongestLine = 1 << 20;

void check(bool holds, const char* what) {
  if (!holds) throw std::system_error(errno, std::generic_category(), what);
}

void make_non_blocking(const Fd& fd) {
  check(::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK) == 0, "fcntl");
}

}  // namespace

Channel make_pipe() {
  int ends[2];
  check(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
  Channel channel{Fd(ends[0]), Fd(ends[1])};
  make_non_blocking(channel.launcher);
  return channel;
}

Channel make_pseudo_terminal(int like) {
  Channel channel;
  channel.launcher = Fd(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  const int master = channel.launcher.get();
  std::array<char, 128> name{};
  check(master >= 0 && ::grantpt(master) == 0 && ::unlockpt(master) == 0 &&
            ::ptsname_r(master, name.data(), name.size()) == 0,
        "pseudo-terminal");
  channel.worker = Fd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
  check(static_cast<bool>(channel.worker), name.data());
  termios settings{};
  check(::tcgetattr(channel.worker.get(), &settings) == 0, "tcgetattr");
  ::cfmakeraw(&settings);
  check(::tcsetattr(channel.worker.get(), TCSANOW, &settings) == 0, "tcsetattr");
  copy_window_size(like, master);
  make_non_blocking(channel.launcher);
  return channel;
}

void copy_window_size(int from, int to) {
  winsize size{};
  if (::ioctl(from, TIOCGWINSZ, &size) == 0) ::ioctl(to, TIOCSWINSZ, &size);
}

Stream::Stream(Fd source, LogWriter& logs, Options options)
    : source_(std::move(source)),
      logs_(&logs),
      options_(std::move(options)),
      log_(logs.open(options_.log_path, options_.append)) {
  if (options_.append) {
    std::error_code error;
    const auto size = std::filesystem::file_size(options_.log_path, error);
    log_begin_ = options_.log_begin.value_or(error ? 0 : static_cast<int64_t>(size));
  }
  log_end_ = log_begin_;
}

bool Stream::pump() {
  if (!source_) return false;
  std::array<char, 16 * 1024> buffer{};
  const ssize_t size = ::read(source_.get(), buffer.data(), buffer.size());
  if (size > 0) {
    const std::string_view bytes(buffer.data(), static_cast<size_t>(size));
    logs_->write(log_, bytes);
    log_end_ += size;
    if (options_.terminal) show(bytes);
    return true;
  }
  // A pseudo-terminal whose last writer has gone says EIO where a pipe says end of file.
  const bool ended = size == 0 || (errno != EAGAIN && errno != EINTR);
  if (ended) finish();
  return false;
}

void Stream::finish() {
  source_.reset();
  if (!line_.empty()) options_.terminal->write(shown(line_));
  line_.clear();
}

void Stream::show(std::string_view bytes) {
  if (options_.prefix.empty() && options_.line_start.empty()) {
    options_.terminal->write(bytes);
    return;
  }
  line_.append(bytes);
  std::string whole;
  size_t begin = 0;
  for (size_t end = line_.find('\n'); end != std::string::npos; end = line_.find('\n', begin)) {
    whole += shown(std::string_view(line_).substr(begin, end - begin));
    begin = end + 1;
  }
  line_.erase(0, begin);
  if (line_.size() > kLongestLine) {
    whole += shown(line_);
    line_.clear();
  }
  options_.terminal->write(whole);
}

// What the terminal gets of a line: nothing if the line is not to be shown.
std::string Stream::shown(std::string_view line) const {
  if (!line.starts_with(options_.line_start)) return "";
  return options_.prefix + std::string(line) + "\n";
}

}  // namespace cohort::launch
