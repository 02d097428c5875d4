// What `cohort run` is told: one field per flag.
#pragma once
#include <chrono>
#include <string>
#include <vector>

namespace cohort::launch {

/// Which ranks' output goes to the launcher's own stdout and stderr, beside the log files.
enum class Tee {
  kRank0,  ///< Rank 0's bytes as they are; a terminal stays a terminal for it.
  kAll,    ///< Every local rank, line by line, each line after "[rank r] ".
  kNone,   ///< Log files only.
};

/// Flags of `cohort run`. Every node is given the same values but for node_rank.
struct RunOptions {
  std::vector<std::string> command;  ///< Program (a path, or a name found in PATH) and arguments.
  int nproc_per_node = 1;            ///< Workers on this node, the same on every node; >= 1.
  int nnodes = 1;                    ///< Nodes of the job, >= 1.
  int node_rank = 0;                 ///< This node, in [0, nnodes).
  std::string master_addr;           ///< Node 0's address; empty: 127.0.0.1, for one node only.
  int master_port = 0;               ///< Store's port on node 0; 0: a free one, for one node only.
  std::string log_dir;  ///< Empty: a fresh folder under TMPDIR, kept only after a failure.
  Tee tee = Tee::kRank0;
  std::chrono::milliseconds grace{5000};  ///< Time the others have to leave after a failure.

  int world_size() const { return nnodes * nproc_per_node; }
  int rank_of(int local_rank) const { return node_rank * nproc_per_node + local_rank; }
};

/// Checks ranges and combinations.
/// Errors: ConfigError that names the flag.
void validate(const RunOptions& options);

}  // namespace cohort::launch
