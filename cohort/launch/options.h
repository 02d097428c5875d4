// SPDX-License-Identifier: Apache-2.0
// The options of `cohort run`: one field per flag.
#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace cohort::launch {

/// Which ranks' output goes to the launcher's own stdout and stderr, beside the log files.
enum class Tee {
  /// Rank 0's bytes as they are; a terminal stays a terminal for it. Of other ranks R only lines
  /// that begin with "[rank R] " (Console::force_print).
  kRank0,
  kAll,     ///< Every local rank, line by line, each line after "[rank r] ".
  kNone,    ///< Log files only.
  kChosen,  ///< What RunOptions::tee_streams names, line by line like kAll.
};

enum class BindCores {
  kNone,   ///< Workers float over the cores that this process may use.
  kCores,  ///< Each worker is pinned to its share of them: contiguous, as many for each.
  kNode,   ///< Each worker is pinned to those on the NUMA node of its GPU (gpu_nodes.h).
};

/// Streams of a local rank, as torchrun counts them.
inline constexpr int kStdout = 1;
inline constexpr int kStderr = 2;

/// A set of streams per local rank: the sum of kStdout and kStderr.
struct StreamChoice {
  int every = 0;               ///< For ranks that of_rank does not name.
  std::map<int, int> of_rank;  ///< By local rank.

  int of(int local_rank) const;
};

/// Reads torchrun's "3" (every local rank) or "0:1,1:2" (these local ranks, no other).
/// `words`: other values that the caller accepts, for the message: "rank0, all, ".
/// Errors: ConfigError that names `flag` and what it takes.
StreamChoice parse_stream_choice(const std::string& flag, const std::string& text,
                                 const std::string& words = {});

/// How many nodes a job has: as many as `max`, at least `min`.
struct NodeCount {
  int min = 1;
  int max = 1;

  std::string text() const;  ///< "2" or "1:4".
};

/// "0.005 s": a time in the unit of the flags that set it.
std::string seconds_text(std::chrono::milliseconds time);

/// Reads "2" or "1:4".
/// Errors: ConfigError that names --nnodes.
NodeCount parse_node_count(const std::string& text);

struct RunOptions;

/// Reads torchrun's "keep_alive_interval=5,join_timeout=600" into `options`; numbers are seconds,
/// or a count. Keys: join_timeout (rdzv_timeout), last_call_timeout, keep_alive_interval,
/// keep_alive_max_attempt.
/// Errors: ConfigError that names --rdzv-conf: another key, one given twice, seconds outside
///         [0.05, 1000000], or keep_alive_max_attempt outside [1, 1000].
void parse_rdzv_conf(const std::string& text, RunOptions& options);

/// The parameter servers that run beside the workers of a job on one node.
struct ServerOptions {
  int count = 0;        ///< 0: none.
  std::string program;  ///< A path; started as PROGRAM server --endpoint HOST:PORT ...
  std::vector<std::string> arguments;  ///< Further ones, after the launcher's own.
  std::string folder;  ///< Gets server.<id>/ for each; empty: servers/ in the folder of logs.
  int max_restarts =
      0;  ///< Of all servers together; a restarted one has its port and folder again.
};

/// What restarts after a worker failed.
enum class RestartPolicy {
  kGroup,   ///< All workers.
  kSingle,  ///< That worker alone: trainers of servers without a process group.
};

/// On one node.
inline constexpr int kMostWorkers = 4096;

/// When a launcher of an elastic job counts as lost; torchrun's names.
struct KeepAlive {
  std::chrono::milliseconds interval{5000};  ///< Silence after which a launcher reconnects.
  int max_attempt = 3;                       ///< Intervals of silence after which a node is lost.

  std::chrono::milliseconds limit() const { return interval * max_attempt; }
  /// Time between two heartbeats.
  std::chrono::milliseconds heartbeat_interval() const { return interval / 5; }
};

/// Flags of `cohort run`. Every node is given the same values but for node_rank, and nproc_per_node
/// with rdzv_endpoint.
struct RunOptions {
  std::vector<std::string> command;  ///< Program (a path, or a name found in PATH) and arguments.
  int nproc_per_node = 1;            ///< Workers on this node; >= 1.
  NodeCount nnodes;                  ///< Nodes of the job; min < max needs rdzv_endpoint.
  int node_rank = 0;                 ///< This node, in [0, nnodes.max). Unused with rdzv_endpoint.
  std::string master_addr;           ///< Node 0's address; empty: 127.0.0.1, for one node only.
  int master_port = 0;               ///< Store's port on node 0; 0: a free one.

  /// "host:port" of the rendezvous (rendezvous_server.h); empty: none.
  std::string rdzv_endpoint;
  std::string rdzv_id = "none";  ///< Name of the job: a launcher with another one is refused.
  /// Timeout of the rendezvous: for enough nodes, and for a rendezvous server that cannot be
  /// reached.
  std::chrono::milliseconds rdzv_timeout{600'000};
  /// Wait for more nodes, once there are enough.
  std::chrono::milliseconds last_call_timeout{1000};
  KeepAlive keep_alive;
  /// Launchers prove to each other that they have it; workers get one made from it. Empty: none.
  std::string rdzv_secret;
  int max_restarts = 0;  ///< Restarts after a worker failed.
  RestartPolicy restart_policy = RestartPolicy::kGroup;
  /// Of the servers, which it is passed to: "fail", "wait" or "continue"; empty: their default.
  /// Under "continue" the job continues without a worker that failed for good.
  std::string on_trainer_loss;

  ServerOptions servers;
  /// "host:port,unix:PATH" of servers that were started otherwise, in the order of their numbers:
  /// the workers are their trainers. Empty: none.
  std::string pservers;

  std::string log_dir;  ///< Empty: a fresh folder under TMPDIR, kept only after a failure.
  Tee tee = Tee::kRank0;
  StreamChoice tee_streams;  ///< For Tee::kChosen; names local ranks below nproc_per_node only.
  StreamChoice redirects;    ///< Under Tee::kRank0: streams that go to their files only; likewise.
  std::chrono::milliseconds grace{5000};  ///< Time the others have to leave after a failure.
  BindCores bind_cores = BindCores::kNone;
  std::string machine_root;  ///< What precedes /proc and /sys under BindCores::kNode, for tests.
  std::string interface;  ///< Network interface of the workers' collectives; empty: their choice.
  std::chrono::milliseconds watch_period{0};  ///< Time between two tables of ranks; 0: none.
  std::chrono::milliseconds stall_timeout{
      60'000};  ///< Wait in a collective worth a report; 0: none.

  std::string program_name = "cohort run";  ///< Prefix of the launcher's own lines.

  bool elastic() const { return !rdzv_endpoint.empty(); }
  /// Whether a worker may fail or restart while the others continue: they have no process group.
  bool independent() const {
    return restart_policy == RestartPolicy::kSingle || on_trainer_loss == "continue";
  }
  /// The streams of a worker that are shown on the launcher's own.
  int shown_streams(int rank, int local_rank) const;
};

/// What a forked worker runs (spawn.h). It returns the worker's exit code.
using WorkerFunction = std::function<int(int local_rank)>;

/// Checks ranges and combinations.
/// Errors: ConfigError that names the flag.
void validate(const RunOptions& options);

}  // namespace cohort::launch
