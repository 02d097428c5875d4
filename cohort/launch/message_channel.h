// SPDX-License-Identifier: Apache-2.0
// Reliable messages between two processes over connections that may break.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/line_socket.h"

namespace cohort::launch {

/// Delivers each message once and in order, although connections break: a message is kept until the
/// peer acknowledges it, and is resent over the next connection.
///
/// A line is "NUMBER RECEIVED TEXT": the message's number, from 1, and the number of the last one
/// that its sender has received. A heartbeat is a line with number 0 and no text.
class MessageChannel {
 public:
  using Clock = LineSocket::Clock;

  /// Resumes over `line`, whose peer has received everything up to message `acknowledged`.
  void attach(LineSocket line, int64_t acknowledged);
  /// Closes the connection; keeps the messages.
  void disconnect() { line_.close(); }
  bool connected() const { return line_.open(); }
  /// When the last byte arrived, or the connection was attached.
  Clock::time_point last_byte_at() const { return line_.last_byte_at(); }

  /// The number of the last message received.
  int64_t received() const { return received_; }
  /// `text` holds no line end.
  void send(std::string text);
  /// Sends a heartbeat, which also acknowledges what was received.
  void send_heartbeat();
  void add_polls(std::vector<pollfd>& polls) const { line_.add_polls(polls); }
  /// Sends and receives without blocking.
  void poll() { line_.poll(); }
  /// Returns the next message. A peer that sends anything else than the form above is disconnected.
  std::optional<std::string> next();

 private:
  void acknowledge(int64_t number);
  void put(int64_t number, const std::string& text);

  LineSocket line_;
  std::deque<std::string> unacknowledged_;
  int64_t sent_ = 0;  // The number of the last message of unacknowledged_, or before it.
  int64_t received_ = 0;
};

}  // namespace cohort::launch
