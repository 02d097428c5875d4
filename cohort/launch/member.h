// A launcher's connection to the coordinator of its job; coordinator.h holds the protocol.
#pragma once
#include <chrono>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/endpoint.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/line_socket.h"
#include "cohort/launch/options.h"
#include "cohort/launch/report.h"

namespace cohort::launch {

/// What the coordinator wants of this node.
struct Order {
  enum class Kind {
    kRound,  ///< Start the workers at `place`.
    kStop,   ///< Stop them and join again; `why` says so.
    kEnd,    ///< The job is over with `code`; `why` is empty if it ended well.
  };
  Kind kind = Kind::kEnd;
  NodePlace place;
  int code = 0;
  std::string why;
};

/// Keeps up the connection and turns messages into orders. turn() blocks for a fifth of a second
/// at most, and only while there is no connection yet.
class Member {
 public:
  /// Tries to connect for options.rdzv_timeout; then, and when the connection is lost, the order is
  /// kEnd with exit code 3. The coordinator refuses settings of the job that are not its own: kEnd
  /// with exit code 2.
  Member(const Endpoint& endpoint, const RunOptions& options);

  /// Asks to take part in the next round; sent as soon as there is a connection.
  /// `store_port`: of this node's store socket, on the coordinator's node; else 0.
  void join(int store_port);
  void tell_done(int code);
  void tell_failed(const Verdict& verdict, const std::string& why);
  void leave() { line_.close(); }

  /// Adds what turn() waits for; turn() is due every half second anyway.
  void add_polls(std::vector<pollfd>& polls) const { line_.add_polls(polls); }
  void turn();
  /// Returns the next order, in order of arrival.
  std::optional<Order> next();

 private:
  using Clock = std::chrono::steady_clock;
  void connect();
  Order lost(const std::string& how) const;

  const Endpoint endpoint_;
  const RunOptions options_;
  const Clock::time_point began_;
  LineSocket line_;
  bool connected_ = false;
  bool over_ = false;
  int64_t round_ = 0;
  std::string to_join_;  // Waits for the connection.
  Clock::time_point beat_at_;
};

}  // namespace cohort::launch
