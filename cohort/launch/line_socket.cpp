// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/line_socket.h"

#include <array>
#include <sys/socket.h>
#include <utility>

#include "cohort/base/tcp.h"

namespace cohort::launch {
namespace {

constexpr size_t kMostBytes = 64 * 1024;

}  // namespace

void LineSocket::send(const std::string& line) {
  if (!open()) return;
  outgoing_ += line + "\n";
  flush();
}

void LineSocket::flush() {
  while (open() && !outgoing_.empty()) {
    const ssize_t size = ::send(fd_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (size < 0) {
      if (!would_block() || outgoing_.size() > kMostBytes) close();
      return;
    }
    outgoing_.erase(0, static_cast<size_t>(size));
  }
}

void LineSocket::add_polls(std::vector<pollfd>& polls) const {
  if (!open()) return;
  const int events = outgoing_.empty() ? POLLIN : POLLIN | POLLOUT;
  polls.push_back({fd_.get(), static_cast<short>(events), 0});
}

void LineSocket::poll() {
  flush();
  incoming_.erase(0, std::exchange(num_taken_, 0));
  std::array<char, 4096> buffer{};
  // What is more stays with the kernel until the lines that are here have been taken.
  while (open() && incoming_.size() <= kMostBytes) {
    const ssize_t size = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (size < 0 && would_block()) return;
    if (size <= 0) return close();
    incoming_.append(buffer.data(), static_cast<size_t>(size));
    last_byte_at_ = Clock::now();
  }
  if (incoming_.size() > kMostBytes && incoming_.find('\n') == std::string::npos) close();
}

std::optional<std::string> LineSocket::next() {
  const size_t end = incoming_.find('\n', num_taken_);
  if (end == std::string::npos) return std::nullopt;
  std::string line = incoming_.substr(num_taken_, end - num_taken_);
  num_taken_ = end + 1;
  return line;
}

}  // namespace cohort::launch
