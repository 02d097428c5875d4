// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/local_agent.h"

#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/report.h"

namespace cohort::launch {

int LocalAgent::run_job() {
  NodeInfo node;
  node.node_rank = options_.node_rank;
  node.num_nodes = options_.nnodes.max;
  node.base_rank = options_.node_rank * options_.nproc_per_node;
  node.world_size = options_.nnodes.max * options_.nproc_per_node;
  if (!options_.master_addr.empty()) node.master_addr = options_.master_addr;
  if (node.num_nodes == 1) {
    node.job_id = random_hex(8);
    node.job_secret = random_hex(16);
    // The launchers of several nodes do not know whose job the other files are of.
    logs_.remove_ranks_from(node.world_size);
  }
  if (options_.servers.count > 0) {
    servers_ = std::make_unique<ServerGroup>(options_, log_dir_, log_writer_, reaper_, signals_);
  }
  while (true) {
    node.master_port = options_.master_port;
    if (node.node_rank == 0) bind_store();
    if (node.node_rank == 0) node.master_port = store_.port;
    start_round(node);
    while (group_->running()) run_once();
    end_group();
    const JobOutcome job = job_outcome(group_->outcomes());
    const bool again = job.root_cause && job.meaning != kExitUsage && stop_signal_ == 0 &&
                       node.restart_count < options_.max_restarts && !server_failed_first_ &&
                       options_.restart_policy == RestartPolicy::kGroup;
    if (!again) return conclude(stop_servers(job));
    ++node.restart_count;
    ++node.round;
    logs_.keep();
    print_line(describe(*job.root_cause, log_dir_) + "; restart " +
               std::to_string(node.restart_count) + " of " + std::to_string(options_.max_restarts));
  }
}

// The servers outlive the workers, which save their last state through them.
JobOutcome LocalAgent::stop_servers(JobOutcome job) {
  if (!servers_) return job;
  servers_->stop(options_.grace);
  while (servers_->running()) run_once();
  for (const std::string& line : servers_->end()) print_line(line);
  log_writer_.flush();
  const auto& failure = servers_->failure();
  const bool server_is_root_cause = failure && (server_failed_first_ || job.exit_code == kExitOk);
  return server_is_root_cause ? JobOutcome{failure->status.exit_code, failure->meaning(), failure}
                              : job;
}

}  // namespace cohort::launch
