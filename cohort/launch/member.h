// A launcher's connection to the coordinator of its job; coordinator.h holds the protocol.
#pragma once
#include <chrono>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/endpoint.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/handshake.h"
#include "cohort/launch/message_channel.h"
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

/// Keeps up the connection and turns messages into orders.
///
/// A connection that breaks, or brings nothing for keep_alive.interval, is replaced: the workers go
/// on meanwhile, and nothing that either side said is lost. If the coordinator has given this node
/// up by then, the order is kStop, and the node joins again under its old name. The order is kEnd
/// with exit code 3 when there was no connection for rdzv_timeout, or nobody has listened at the
/// endpoint any more for kReturn. The coordinator refuses settings of the job that are not its own:
/// kEnd with exit code 2.
/// Threads: any one. turn() blocks while it connects: for the name service, and a fifth of a
/// second.
class Member {
 public:
  Member(const Endpoint& endpoint, const RunOptions& options);

  /// Asks to take part in the next round.
  /// `store_port`: of this node's store socket, on the coordinator's node; else 0.
  void join(int store_port);
  void tell_done(int code);
  void tell_failed(const Verdict& verdict, const std::string& why);
  void leave();

  /// Adds what turn() waits for; turn() is due after a quarter of a second anyway.
  void add_polls(std::vector<pollfd>& polls) const;
  void turn();
  /// Returns the next order, in order of arrival.
  std::optional<Order> next();

 private:
  using Clock = std::chrono::steady_clock;
  void connect();
  void greet();
  void hear(const std::string& line);
  void on_welcome(const Welcome& welcome);
  void talk();
  void begin_session();
  void note_loss();
  std::string why_lost() const;
  Order obey(const std::string& text);
  Order end(int code, const std::string& why);
  Order end_by(const std::string& how);

  const Endpoint endpoint_;
  const RunOptions options_;
  bool over_ = false;
  bool welcomed_ = false;  // In this session.
  bool was_welcomed_ = false;
  Hello hello_;
  std::string challenge_;  // Not empty: this side's hello was sent.
  LineSocket line_;        // While the handshake goes on.
  Clock::time_point connected_at_;
  MessageChannel channel_;
  Clock::time_point lost_since_;  // While there is no connection.
  std::optional<Clock::time_point> refused_since_;
  std::optional<Order> to_give_;
  int64_t round_ = 0;
  Clock::time_point beat_at_;
};

}  // namespace cohort::launch
