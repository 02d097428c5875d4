// What a worker finds in its environment. The table for users is docs/launch.md.
#pragma once
#include <string>
#include <vector>

#include "cohort/launch/options.h"

namespace cohort::launch {

/// The facts of one worker that the options do not hold.
struct WorkerPlace {
  int local_rank = 0;
  int master_port = 0;
  std::string log_dir;
  int store_fd = -1;  ///< The inherited listening socket; rank 0 only.
  int num_cores = 1;  ///< Cores that this node's workers share.
};

/// Returns `base` ("NAME=value" each) with the worker's variables in it.
///
/// RANK and its companions replace what `base` holds; OMP_NUM_THREADS is set only where it is
/// missing or empty, to the worker's share of the cores; COHORT_STORE_FD is removed for ranks
/// without a socket.
std::vector<std::string> worker_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const WorkerPlace& place);

/// Returns the launcher's own environment.
std::vector<std::string> own_environment();

/// Returns the number of cores that this process may run on.
int usable_cores();

/// Returns the path where a worker of `rank` leaves the text of its fatal error.
std::string error_file(const std::string& log_dir, int rank);

/// Returns the path of the log of `stream` ("stdout" or "stderr") of `rank`.
std::string log_file(const std::string& log_dir, int rank, const std::string& stream);

}  // namespace cohort::launch
