// SPDX-License-Identifier: Apache-2.0
// The environment of a worker. The table for users is docs/launch.md.
#pragma once
#include <string>
#include <vector>

#include "cohort/launch/options.h"

namespace cohort::launch {

/// Ranks, sizes and addresses of one node in one round of a job. A round is the life of one set of
/// workers, from their common start to their common end.
struct NodeInfo {
  int node_rank = 0;
  int num_nodes = 1;
  int base_rank = 0;   ///< Rank of the node's first worker.
  int world_size = 1;  ///< Workers on all nodes.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int restart_count = 0;   ///< Rounds that ended because a worker failed.
  int round = 1;           ///< Number of the round in the whole job.
  std::string job_id;      ///< Drawn for the job; empty without a rendezvous of launchers.
  std::string job_secret;  ///< Likewise; empty, too, where --rdzv-secret-file gives one.
};

/// What a worker needs beside the options and its node's NodeInfo.
struct WorkerInfo {
  int local_rank = 0;
  int restarts = 0;  ///< Of this worker alone.
  std::string log_dir;
  int store_fd = -1;       ///< The inherited listening socket; rank 0 only.
  int num_threads = 1;     ///< This worker's share of the node's cores.
  std::string servers;     ///< Endpoints of the launcher's own servers, with commas; empty: none.
  std::string job_secret;  ///< Shared by the job's processes; empty: none drawn.
};

/// What a parameter server needs.
struct ServerInfo {
  int id = 0;
  std::string endpoint;
  std::string endpoints;  ///< Of all servers, with commas between.
  std::string log_dir;
  std::string job_secret;
};

/// Returns `base` ("NAME=value" each) with the worker's variables in it.
///
/// RANK and its companions replace what `base` holds; OMP_NUM_THREADS is set only where it is
/// missing or empty, COHORT_JOB_SECRET only where there is one; COHORT_STORE_FD is removed for
/// ranks without a socket, COHORT_ROUND for several launchers without a rendezvous, and
/// TORCHELASTIC_USE_AGENT_STORE for all: here rank 0 serves the store. With servers
/// (the launcher's or options.pservers), Paddle's variables say TRAINER and where they are.
std::vector<std::string> worker_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const NodeInfo& node,
                                            const WorkerInfo& info);

/// Returns `base` with a server's variables in it: Paddle's, which say PSERVER and where it
/// listens, and COHORT_ERROR_FILE. Those that number a worker are removed.
std::vector<std::string> server_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const ServerInfo& info);

/// Returns the launcher's own environment.
std::vector<std::string> own_environment();

/// Returns the path where a worker of `rank` leaves the text of its fatal error.
std::string error_file(const std::string& log_dir, int rank);

/// Returns the path of the page where a worker of `rank` keeps its last collective.
std::string trace_file(const std::string& log_dir, int rank);

/// Returns the path where a worker of `rank` leaves its stack when asked.
std::string stack_file(const std::string& log_dir, int rank);

/// Returns the path where server `id` leaves the text of its fatal error.
std::string server_error_file(const std::string& log_dir, int id);

/// Returns the path of the log of server `id`.
std::string server_log_file(const std::string& log_dir, int id);

/// Returns the path of the log of `stream` ("stdout" or "stderr") of `rank`.
std::string log_file(const std::string& log_dir, int rank, const std::string& stream);

}  // namespace cohort::launch
