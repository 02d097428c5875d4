// Where this process stands among the ranks: read from options or from a launcher's environment.
// Pure: reads variables, opens nothing.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::comm {

/// One process's place. rank = node_rank * processes per node + local_rank when nodes are counted.
struct Place {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< Among the ranks of this host.
  int local_world_size = 1;  ///< Ranks of this host.
  /// The launcher said neither: both are found when the ranks meet, and ProcessGroup::place() has
  /// them.
  bool finds_host = false;
  std::string master_addr;  ///< Host of rank 0's store; empty for one process, and with store_file.
  int master_port = 0;      ///< Its port; 0 for one process, and with store_file.
  std::optional<int> store_fd;  ///< Rank 0: a listening socket on master_port, inherited.
  std::string source;           ///< Which contract was found: "torchrun's environment", ...
  /// The job's and the round's name, where the launcher gives one: ranks of another do not meet
  /// these, even at the same address. Equal on all ranks.
  std::string job;
  std::string store_file;  ///< Path of a file to meet by, instead of master_addr; empty: none.
  bool agent_store =
      false;  ///< The launcher itself serves the store (torchrun does); rank 0 only connects.
};

/// Explicit numbers, from a program's flags; they go before any environment.
struct PlaceOptions {
  std::optional<int> rank;            ///< With nproc_per_node: the node's rank.
  std::optional<int> world_size;      ///< With nproc_per_node: the number of nodes.
  std::optional<int> nproc_per_node;  ///< Then LOCAL_RANK must be exported.
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  /// Where to meet: "tcp://host:port", "file:///path" (seen by all ranks), or "env://" (MASTER_ADDR
  /// and MASTER_PORT, the default). The numbers come from the fields above or from the environment,
  /// whatever the way.
  std::optional<std::string> dist_url;
};

/// Finds this process's place from the first complete contract: options, torchrun's variables,
/// Open MPI's, Slurm's, Paddle's. None at all: one process (source says so).
///
/// Local. Errors: ConfigError that names what is missing from half a contract, or the variable that
/// is no number or out of range, or a dist_url of another form, or one given beside master_addr or
/// master_port. Never degrades half a contract to one process. Source: docs/comm.md lists the
/// variables of each contract.
Place discover_place(const PlaceOptions& options = {});

/// The place of `rank` among `endpoints`, "host:port" each, in the order of ranks; the first one's
/// is where rank 0's store listens. (What Paddle's environment and ps::plan's mode kCollective
/// list.) Local. Errors: ConfigError that names `name`: no such rank, or an endpoint of another
/// form.
Place place_among(const std::vector<std::string>& endpoints, int rank,
                  const std::string& name = "endpoints");

/// Returns name and value of the variable by which a launcher numbered this process, whatever is
/// missing beside it; nothing if none did.
std::optional<std::pair<std::string, std::string>> launched_as();

/// Returns the device that this rank computes on: its local rank, or 0 where the rank sees one
/// device only (as under Slurm's --gpus-per-task). Errors: ConfigError if this host runs more ranks
/// than it has devices, or has none, or if the local rank is not known yet.
int device_index(const Place& place, int num_devices);

}  // namespace cohort::comm
