// The place where launchers of several nodes meet: it numbers them, and ends and begins rounds.
//
// The launcher that can listen at --rdzv-endpoint hosts it, and is node 0; every launcher, that one
// too, connects to it (member.h). The protocol is one JSON object a line, "say" names the kind:
//
// From a node
//   {"say": "join", "version": 2, "id": "job", "nnodes": "1:3", "max_restarts": 0, "nproc": 4,
//    "port": 0}   ready for the next round, no worker runs; "port" is where node 0's socket for the
//         store listens, 0 on others. Settings of the job that are not the coordinator's: "end"
//   {"say": "done", "round": 3, "code": 0}            all workers ended well, with 0 or 4
//   {"say": "failed", "round": 3, "code": 1, "why": "rank 2 (pid 17) exited with code 1"}
//   {"say": "alive"}                                  every second
// From the coordinator
//   {"say": "round", "round": 3, "node_rank": 1, "nodes": 2, "base_rank": 4, "world_size": 8,
//    "master_addr": "10.0.0.1", "master_port": 40001, "restart": 0}     start your workers
//   {"say": "stop", "why": "..."}                     stop your workers, then join again
//   {"say": "end", "code": 1, "why": "..."}           the job is over
//   {"say": "alive"}                                  every second
//
// Who is silent for 5 seconds, or closes the connection, has left.
#pragma once
#include <chrono>
#include <list>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/launch/line_socket.h"
#include "cohort/launch/options.h"

namespace cohort::launch {

inline constexpr int kProtocolVersion = 3;
inline constexpr std::chrono::milliseconds kHeartbeat{1000};
inline constexpr std::chrono::milliseconds kSilence{5000};

/// The coordinator: one state for the job, one for each node.
///
/// A round begins when every node that had workers has stopped them, at least nnodes.min are ready,
/// and either nnodes.max are or a second has passed. Nodes are numbered in the order of their first
/// joining, the host first; more than nnodes.max wait for a place. A round ends when a node leaves
/// or joins, or when a worker failed; only the last counts as a restart. A lost peer is taken for a
/// failure only if within 6 seconds no other cause shows. The job ends when all nodes of a round
/// are done; when a worker failed for its configuration, or once more than max_restarts; and when
/// fewer than nnodes.min nodes are there for rdzv_timeout. Threads: none of its own; turn() never
/// blocks.
class Coordinator {
 public:
  /// `listener`: as listen_if_local returned it. `master_addr`: told to the nodes.
  Coordinator(Fd listener, std::string master_addr, const RunOptions& options);

  /// Adds what turn() waits for; turn() is due every half second anyway.
  void add_polls(std::vector<pollfd>& polls) const;
  void turn();
  /// Tells every node that the job is over, if it was not said yet, and waits up to two seconds
  /// until they have read it.
  void finish(int code, const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kNew, kReady, kInRound, kStopping, kDone };
  struct Node {
    LineSocket line;
    State state = State::kNew;
    int num_workers = 0;
    int store_port = 0;  // Not 0: the host.
    int number = -1;     // In the running round.
    int code = 0;        // When done.
  };
  struct Joining {  // What a node says of itself.
    int version = 0;
    std::string id;
    std::string nnodes;
    int max_restarts = 0;
    int num_workers = 0;
    int store_port = 0;
  };
  struct Failure {
    int code = 0;
    int meaning = 0;  // As ExitCode.
    std::string why;
    Clock::time_point decide_at;
  };

  void accept_nodes();
  void listen_to(Node& node);
  void on_join(Node& node, const Joining& joining);
  std::string refusal_of(const Joining& joining) const;
  void on_failed(const Node& node, Failure failure);
  void drop_lost_nodes();
  void heartbeat();
  void gather();
  void begin_round(const std::vector<Node*>& members);
  void watch_round();
  void decide_failure();
  void stop_round(const std::string& why);
  void end_job(int code, const std::string& why);

  Fd listener_;
  const std::string master_addr_;
  const RunOptions options_;
  std::list<Node> nodes_;  // In order of joining.
  bool round_runs_ = false;
  bool ended_ = false;
  int64_t round_ = 0;
  int num_restarts_ = 0;
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> enough_since_;
  Clock::time_point too_few_since_;
  Clock::time_point beat_at_;
};

}  // namespace cohort::launch
