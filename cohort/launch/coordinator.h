// The place where launchers of several nodes meet: it numbers them, and ends and begins rounds.
//
// The launcher that can listen at --rdzv-endpoint hosts it, and is node 0; every launcher, that one
// too, connects to it (member.h). A connection begins with a handshake (handshake.h) and goes on as
// a MessageChannel, whose messages are JSON objects; "say" names the kind:
//
// From a node
//   {"say": "join", "nproc": 4, "port": 0}   ready for the next round, no worker runs; "port" is
//         where node 0's socket for the store listens, 0 on others
//   {"say": "done", "round": 3, "code": 0}            all workers ended well, with 0 or 4
//   {"say": "failed", "round": 3, "code": 1, "meaning": 1, "why": "rank 2 (pid 17) exited with code
//   1"}
//   {"say": "leave"}
// From the coordinator
//   {"say": "round", "round": 3, "node_rank": 1, "nodes": 2, "base_rank": 4, "world_size": 8,
//    "master_addr": "10.0.0.1", "master_port": 40001, "restart": 0,
//    "job_id": "5f0c...", "job_secret": "8a1e..."}   start your workers
//   {"say": "stop", "why": "..."}                     stop your workers, then join again
//   {"say": "end", "code": 1, "why": "..."}           the job is over
//
// A node whose connection breaks, or brings nothing for a while, connects again and goes on where
// it was. It has left once it says so, once its connection has been closed for kReturn and not
// replaced, and once nothing came from it for keep_alive_interval * keep_alive_max_attempt.
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

/// How long a closed connection may stay without a successor.
inline constexpr std::chrono::milliseconds kReturn{3000};

/// The coordinator: one state for the job, one for each node.
///
/// A round begins when every node that had workers has stopped them, at least nnodes.min are ready,
/// and either nnodes.max are or last_call_timeout has passed. Nodes are numbered in the order of
/// their first joining, the host first: one that comes back has its old number among those that are
/// there. More than nnodes.max wait for a place. A round ends when a node leaves or joins, or when
/// a worker failed; only the last counts as a restart. A lost peer is taken for a failure only if
/// no other cause shows while a lost node could be noticed. The job ends when all nodes of a round
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
  struct Guest {  // A connection before the end of its handshake.
    LineSocket line;
    std::string challenge;
    Clock::time_point since;
    bool refused = false;
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

  void accept_guests();
  void listen_to_guests();
  bool hear(Guest& guest, const std::string& line);
  std::string refusal_of(const Guest& guest, const Hello& hello) const;
  void admit(Guest& guest, const Hello& hello);
  void listen_to(Node& node);
  void on_join(Node& node, int num_workers, int store_port);
  void on_failed(const Node& node, Failure failure);
  std::string why_lost(Node& node) const;
  void lose(std::list<Node>::iterator node, const std::string& why);
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
  const std::string job_id_;
  const std::string job_secret_;  // Empty where every node has one: not said aloud then.
  std::list<Guest> guests_;       // The oldest first.
  std::list<Node> nodes_;
  std::map<std::string, size_t> seniority_;  // By name: which one joined first.
  bool round_runs_ = false;
  bool ended_ = false;
  int64_t round_ = 0;
  int num_restarts_ = 0;
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> enough_since_;
  Clock::time_point turned_at_;
  Clock::time_point awake_since_;  // Since this process stood still.
  Clock::time_point too_few_since_;
  Clock::time_point beat_at_;
};

}  // namespace cohort::launch
