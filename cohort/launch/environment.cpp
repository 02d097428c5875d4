// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/environment.h"

#include <map>
#include <unistd.h>

#include "cohort/base/trace_page.h"

namespace cohort::launch {
namespace {

using Variables = std::map<std::string, std::string>;

void set_torchruns(Variables& variables, const RunOptions& options, const NodeInfo& node,
                   int local_rank) {
  variables["RANK"] = std::to_string(node.base_rank + local_rank);
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["WORLD_SIZE"] = std::to_string(node.world_size);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.nproc_per_node);
  variables["GROUP_RANK"] = std::to_string(node.node_rank);
  variables["GROUP_WORLD_SIZE"] = std::to_string(node.num_nodes);
  variables["MASTER_ADDR"] = node.master_addr;
  variables["MASTER_PORT"] = std::to_string(node.master_port);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(node.restart_count);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options.max_restarts);
  variables["TORCHELASTIC_RUN_ID"] = options.rdzv_id;
}

Variables to_variables(const std::vector<std::string>& entries) {
  Variables variables;
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return variables;
}

std::vector<std::string> to_entries(const Variables& variables) {
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

// Paddle's variables of a job with servers; inherited ones would contradict.
void set_paddles(Variables& variables, const std::string& role, const std::string& servers,
                 int num_trainers) {
  for (const char* name :
       {"TRAINING_ROLE", "PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT", "PADDLE_TRAINERS",
        "PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT", "POD_IP",
        "PADDLE_PORT", "PADDLE_CURRENT_IP"}) {
    variables.erase(name);
  }
  variables["PADDLE_TRAINING_ROLE"] = role;
  variables["PADDLE_PSERVERS_IP_PORT_LIST"] = servers;
  variables["PADDLE_TRAINERS_NUM"] = std::to_string(num_trainers);
}

}  // namespace

std::vector<std::string> worker_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const NodeInfo& node,
                                            const WorkerInfo& info) {
  Variables variables = to_variables(base);
  set_torchruns(variables, options, node, info.local_rank);
  const int rank = node.base_rank + info.local_rank;
  variables["COHORT_RESTART_COUNT"] = std::to_string(node.restart_count + info.restarts);
  variables.erase("COHORT_PROCESS_GROUP");
  if (options.independent()) variables["COHORT_PROCESS_GROUP"] = "none";
  // Without a rendezvous each launcher counts its own rounds.
  variables.erase("COHORT_ROUND");
  if (options.elastic() || node.num_nodes == 1)
    variables["COHORT_ROUND"] = std::to_string(node.round);
  variables.erase("COHORT_JOB_ID");
  if (!node.job_id.empty()) variables["COHORT_JOB_ID"] = node.job_id;
  variables["COHORT_LOG_DIR"] = info.log_dir;
  variables["COHORT_ERROR_FILE"] = error_file(info.log_dir, rank);
  variables[kTraceFileVariable] = trace_file(info.log_dir, rank);
  variables.erase("COHORT_STORE_FD");
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  if (info.store_fd >= 0) variables["COHORT_STORE_FD"] = std::to_string(info.store_fd);
  std::string& threads = variables["OMP_NUM_THREADS"];
  if (threads.empty()) threads = std::to_string(info.num_threads);
  if (!options.interface.empty()) {
    variables["GLOO_SOCKET_IFNAME"] = options.interface;
    variables["NCCL_SOCKET_IFNAME"] = options.interface;
  }
  const std::string& servers = info.servers.empty() ? options.pservers : info.servers;
  if (!servers.empty()) {
    set_paddles(variables, "TRAINER", servers, node.world_size);
    variables["PADDLE_TRAINER_ID"] = std::to_string(rank);
  }
  if (!info.job_secret.empty()) variables["COHORT_JOB_SECRET"] = info.job_secret;
  return to_entries(variables);
}

std::vector<std::string> server_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const ServerInfo& info) {
  Variables variables = to_variables(base);
  for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                           "COHORT_STORE_FD", "COHORT_ROUND", kTraceFileVariable}) {
    variables.erase(name);
  }
  set_paddles(variables, "PSERVER", info.endpoints, options.nproc_per_node);
  variables["PADDLE_CURRENT_ENDPOINT"] = info.endpoint;
  variables["COHORT_LOG_DIR"] = info.log_dir;
  variables["COHORT_ERROR_FILE"] = server_error_file(info.log_dir, info.id);
  variables["COHORT_JOB_SECRET"] = info.job_secret;
  return to_entries(variables);
}

std::vector<std::string> own_environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

std::string error_file(const std::string& log_dir, int rank) {
  return log_dir + "/rank" + std::to_string(rank) + ".error.json";
}

std::string trace_file(const std::string& log_dir, int rank) {
  return log_dir + "/rank" + std::to_string(rank) + ".trace";
}

std::string stack_file(const std::string& log_dir, int rank) {
  return trace_file(log_dir, rank) + ".stack";
}

std::string server_error_file(const std::string& log_dir, int id) {
  return log_dir + "/server." + std::to_string(id) + ".error.json";
}

std::string server_log_file(const std::string& log_dir, int id) {
  return log_dir + "/server." + std::to_string(id) + ".log";
}

std::string log_file(const std::string& log_dir, int rank, const std::string& stream) {
  return log_dir + "/rank" + std::to_string(rank) + "." + stream + ".log";
}

}  // namespace cohort::launch
