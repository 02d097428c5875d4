// Messages between two processes that outlive the connections that carry them.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/line_socket.h"

namespace cohort::launch {

/// Delivers each message once and in order, although connections break: a message is kept until
/// the peer says that it has it, and sent again over the next connection.
///
/// A line is "NUMBER RECEIVED TEXT": the message's number, from 1, and the number of the last one
/// that its sender has received. A heartbeat is a line with number 0 and no text.
class MessageChannel {
 public:
  using Clock = LineSocket::Clock;

  /// Goes on over `line`, whose peer has received everything up to message `acknowledged`.
  void attach(LineSocket line, int64_t acknowledged);
  /// Gives up the connection, not the messages.
  void disconnect() { line_.close(); }
  bool connected() const { return line_.open(); }
  /// When the last byte came, or the connection was attached.
  Clock::time_point heard() const { return line_.heard(); }

  /// The number of the last message received.
  int64_t received() const { return received_; }
  /// `text` holds no line end.
  void send(std::string text);
  /// Tells the peer that this side is there, and what it has received.
  void beat();
  void add_polls(std::vector<pollfd>& polls) const { line_.add_polls(polls); }
  /// Sends and receives what the network takes and gives; never blocks.
  void turn() { line_.turn(); }
  /// Returns the next message. A peer that does not keep to the form above is disconnected.
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
