// SPDX-License-Identifier: Apache-2.0
// Rank, world size and rendezvous address of this process, from options or a launcher's
// environment.
// Pure: reads variables, opens nothing.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::comm {

/// One process's rank and the address of its job's store. rank = node_rank * processes per node +
/// local_rank when nodes are counted.
struct RankInfo {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< Among the ranks of this host.
  int local_world_size = 1;  ///< Ranks of this host.
  /// The launcher sets neither: the rendezvous finds both, and ProcessGroup::rank_info() returns
  /// them.
  bool finds_host = false;
  std::string master_addr;  ///< Host of rank 0's store; empty for one process, and with store_file.
  int master_port = 0;      ///< Its port; 0 for one process, and with store_file.
  std::optional<int> store_fd;  ///< Rank 0: a listening socket on master_port, inherited.
  std::string source;           ///< What set the ranks: "torchrun's environment", ...
  /// Name of the job and its round, if the launcher sets one: ranks of another name do not join
  /// these, even at the same address. Equal on all ranks.
  std::string job;
  std::string store_file;  ///< Path of a rendezvous file, instead of master_addr; empty: none.
  bool agent_store =
      false;  ///< The launcher itself serves the store (torchrun does); rank 0 only connects.
};

/// Explicit numbers, from a program's flags; they go before any environment.
struct RankInfoOptions {
  std::optional<int> rank;            ///< With nproc_per_node: the node's rank.
  std::optional<int> world_size;      ///< With nproc_per_node: the number of nodes.
  std::optional<int> nproc_per_node;  ///< Then LOCAL_RANK must be exported.
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  /// Rendezvous address: "tcp://host:port", "file:///path" (seen by all ranks), or "env://"
  /// (MASTER_ADDR and MASTER_PORT, the default). The numbers come from the fields above or from the
  /// environment, whatever the way.
  std::optional<std::string> dist_url;
};

/// Returns this process's rank info from the first of these that is set: options, torchrun's
/// variables, Open MPI's, Slurm's, Paddle's. If none is set, the job is one process (source says
/// so).
///
/// Local.
/// Errors: ConfigError that lists the missing variables of an incomplete environment, or names the
///         variable that is no number or out of range, or a dist_url of another form, or one given
///         beside master_addr or master_port. An incomplete environment never becomes a job of one
///         process. docs/comm.md lists each launcher's variables.
RankInfo rank_info_from_environment(const RankInfoOptions& options = {});

/// Returns the rank info of `rank` among `endpoints`, "host:port" each, in the order of ranks; rank
/// 0's store listens at the first one. (What Paddle's environment and ps::plan's mode kCollective
/// list.) Local.
/// Errors: ConfigError that names `name`: no such rank, or an endpoint of another form.
RankInfo rank_info_from_endpoints(const std::vector<std::string>& endpoints, int rank,
                                  const std::string& name = "endpoints");

/// Returns name and value of the variable by which a launcher numbered this process, whatever is
/// missing beside it; nothing if none did.
std::optional<std::pair<std::string, std::string>> launcher_rank_variable();

/// Returns the device that this rank computes on: its local rank, or 0 where the rank sees one
/// device only (as under Slurm's --gpus-per-task).
/// Errors: ConfigError if `num_devices` is 0, or is above 1 and the local rank is not below it, or
///         is not known yet. With one device there is none: ranks that all see it share it.
int device_index(const RankInfo& info, int num_devices);

}  // namespace cohort::comm
