// SPDX-License-Identifier: Apache-2.0
// A launcher's connection to the rendezvous server of its job; rendezvous_server.h holds the
// protocol.
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

/// What the rendezvous server directs this node to do.
struct Directive {
  enum class Kind {
    kRound,  ///< Start the workers as `node` says.
    kStop,   ///< Stop them and join again, for the reason `why`.
    kEnd,    ///< The job is over with `code`; `why` is empty if it ended well.
  };
  Kind kind = Kind::kEnd;
  NodeInfo node;
  int code = 0;
  std::string why;
};

/// Keeps the connection alive and turns messages into directives.
///
/// A connection that breaks, or delivers nothing for keep_alive.interval, is replaced: the workers
/// keep running and no message is lost. If the rendezvous server has removed this node by then, the
/// directive is kStop, and the node rejoins under its old name. The directive is kEnd with exit
/// code 3 after rdzv_timeout without a connection, or after kReconnectTime in which the endpoint
/// refused connections. If the job's settings differ from the rendezvous server's: kEnd with exit
/// code 2.
/// Threads: any one. poll() blocks while it connects: for the name service, and a fifth of a
/// second.
class RendezvousClient {
 public:
  RendezvousClient(const Endpoint& endpoint, const RunOptions& options);

  /// Asks to join the next round.
  /// `store_port`: of this node's store socket, on the rendezvous server's node; else 0.
  void join(int store_port);
  void send_done(int code);
  void send_failed(const JobOutcome& job, const std::string& why);
  void leave();

  /// Adds what poll() waits for; poll() is due after a quarter of a second anyway.
  void add_polls(std::vector<pollfd>& polls) const;
  void poll();
  /// Returns the next directive, in order of arrival.
  std::optional<Directive> next();

 private:
  using Clock = std::chrono::steady_clock;
  void connect();
  void poll_handshake();
  void handle_handshake(const std::string& line);
  void reject(const std::string& why);
  void on_welcome(const Welcome& welcome);
  void poll_channel();
  void begin_session();
  void on_disconnect();
  std::string loss_reason() const;
  Directive handle_message(const std::string& text);
  Directive end(int code, const std::string& why);
  Directive end_lost(const std::string& how);

  const Endpoint endpoint_;
  const RunOptions options_;
  bool over_ = false;
  bool welcomed_ = false;  // In this session.
  bool was_welcomed_ = false;
  Hello hello_;
  std::string challenge_;  // Not empty: this side's hello was sent.
  LineSocket line_;        // During the handshake.
  Clock::time_point connected_at_;
  MessageChannel channel_;
  Clock::time_point lost_since_;  // While there is no connection.
  std::optional<Clock::time_point> refused_since_;
  std::optional<Directive> pending_;
  int64_t round_ = 0;
  Clock::time_point heartbeat_at_;
};

}  // namespace cohort::launch
