// SPDX-License-Identifier: Apache-2.0
// The rendezvous of the launchers of a multi-node job: assigns node ranks, begins and ends rounds.
//
// The launcher that can listen at --rdzv-endpoint hosts it and is node 0; every launcher, that one
// too, connects to it (rendezvous_client.h). A connection begins with a handshake (handshake.h) and
// continues as a MessageChannel, whose messages are JSON objects of these kinds:
//
// From a node
//   {"kind": "join", "nproc": 4, "port": 0}   ready for the next round, no worker runs; "port" is
//         where node 0's socket for the store listens, 0 on others
//   {"kind": "done", "round": 3, "code": 0}            all workers ended well, with 0 or 4
//   {"kind": "failed", "round": 3, "code": 1, "meaning": 1, "why": "rank 2 (pid 17) ..."}
//   {"kind": "leave"}
// From the server
//   {"kind": "round", "round": 3, "node_rank": 1, "nodes": 2, "base_rank": 4, "world_size": 8,
//    "master_addr": "10.0.0.1", "master_port": 40001, "restart": 0,
//    "job_id": "5f0c...", "job_secret": "8a1e..."}   start your workers
//   {"kind": "stop", "why": "..."}                     stop your workers, then join again
//   {"kind": "end", "code": 1, "why": "..."}           the job is over
//
// A node whose connection breaks, or delivers nothing for keep_alive_interval, reconnects and
// resumes its session. A node has left when it sends "leave", when its connection stays closed for
// kReconnectTime, and when nothing arrives from it for keep_alive_interval *
// keep_alive_max_attempt.
#pragma once
#include <chrono>
#include <list>
#include <map>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/handshake.h"
#include "cohort/launch/message_channel.h"
#include "cohort/launch/options.h"

namespace cohort::launch {

/// Time in which a node must replace a closed connection.
inline constexpr std::chrono::milliseconds kReconnectTime{3000};

/// Holds the state of the job and of each node.
///
/// A round begins when every node that had workers has stopped them, at least nnodes.min are ready,
/// and either nnodes.max are or last_call_timeout has passed. Node ranks follow the order of the
/// first join, the host first: a node that rejoins is sorted in at its old position. Nodes beyond
/// nnodes.max wait for the next round. A round ends when a node leaves or joins, or when a worker
/// failed; only the last counts as a restart. A lost peer (exit code 3) counts as the failure only
/// if no other cause appears in the time in which a lost node would be noticed. The job ends when
/// all nodes of a round are done; when a worker failed for its configuration, or once more than
/// max_restarts; and when fewer than nnodes.min nodes are connected for rdzv_timeout.
/// Threads: none of its own; poll() never blocks.
class RendezvousServer {
 public:
  /// `listener`: as listen_if_local returned it. `master_addr`: sent to the nodes.
  RendezvousServer(Fd listener, std::string master_addr, const RunOptions& options);

  /// Adds what poll() waits for; poll() is due every half second anyway.
  void add_polls(std::vector<pollfd>& polls) const;
  void poll();
  /// Sends "end" to every node, unless that was done, and waits up to two seconds until they have
  /// read it.
  void finish(int code, const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kNew, kReady, kInRound, kStopping, kDone };
  struct PendingConnection {  // A connection before the end of its handshake.
    LineSocket line;
    std::string challenge;
    Clock::time_point since;
    bool rejected = false;
  };
  struct Node {
    std::string name;
    int64_t session = 0;
    MessageChannel channel;
    std::optional<Clock::time_point> closed_since;
    bool has_left = false;
    State state = State::kNew;
    Clock::time_point stopping_since;
    int num_workers = 0;
    int store_port = 0;  // Not 0: the host.
    int number = -1;     // In the running round.
    int code = 0;        // When done.
  };
  struct Failure {
    int code = 0;
    int meaning = 0;  // As ExitCode.
    std::string why;
    Clock::time_point decide_at;
  };

  void accept_connections();
  void poll_pending();
  bool handle_hello(PendingConnection& connection, const std::string& line);
  std::string rejection_reason(const PendingConnection& connection, const Hello& hello) const;
  void accept(PendingConnection& connection, const Hello& hello);
  void handle_messages(Node& node);
  void on_join(Node& node, int num_workers, int store_port);
  void on_failed(const Node& node, Failure failure);
  std::string loss_reason(Node& node) const;
  void remove(std::list<Node>::iterator node, const std::string& why);
  void remove_lost_nodes();
  void send_heartbeats();
  void try_begin_round();
  void begin_round(const std::vector<Node*>& members);
  void check_round();
  void decide_failure();
  void stop_round(const std::string& why);
  void end_job(int code, const std::string& why);

  Fd listener_;
  const std::string master_addr_;
  const RunOptions options_;
  const std::string job_id_;
  const std::string job_secret_;          // Empty where every node has one: it is not sent then.
  std::list<PendingConnection> pending_;  // The oldest first.
  std::list<Node> nodes_;
  std::map<std::string, size_t> join_order_;  // By name: which one joined first.
  bool round_runs_ = false;
  bool ended_ = false;
  int64_t round_ = 0;
  int num_restarts_ = 0;
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> enough_since_;
  Clock::time_point polled_at_;
  Clock::time_point awake_since_;  // When this process last resumed after a suspension.
  Clock::time_point too_few_since_;
  Clock::time_point heartbeat_at_;
};

}  // namespace cohort::launch
