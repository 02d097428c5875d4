// SPDX-License-Identifier: Apache-2.0
// Lines of text over a TCP connection, without ever waiting.
#pragma once
#include <chrono>
#include <cstddef>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// One end of a connection that carries lines. It ends when the other side closes it, sends a line
/// of more than 64 KiB, or lets 64 KiB wait unread; lines received before that can still be read.
class LineSocket {
 public:
  using Clock = std::chrono::steady_clock;

  /// Takes a connected, non-blocking socket; one that is none makes an ended LineSocket.
  explicit LineSocket(Fd fd = Fd()) : fd_(std::move(fd)), last_byte_at_(Clock::now()) {}

  bool open() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }
  /// When the last byte arrived.
  Clock::time_point last_byte_at() const { return last_byte_at_; }
  /// Queues `line`, which holds no line end, and sends what the network takes.
  void send(const std::string& line);
  /// Adds what poll() waits for.
  void add_polls(std::vector<pollfd>& polls) const;
  /// Sends and receives what it can; receives no more while 64 KiB of lines wait for next().
  void poll();
  /// Returns the next line received, without its end.
  std::optional<std::string> next();

 private:
  void flush();

  Fd fd_;
  std::string incoming_;
  size_t num_taken_ = 0;  // Bytes at the front of incoming_ that next() has returned.
  std::string outgoing_;
  Clock::time_point last_byte_at_;
};

}  // namespace cohort::launch
