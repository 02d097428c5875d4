#include "cohort/launch/environment.h"

#include <map>
#include <unistd.h>

#include "cohort/base/trace_page.h"

namespace cohort::launch {
namespace {

using Variables = std::map<std::string, std::string>;

void set_torchruns(Variables& variables, const RunOptions& options, const NodePlace& node,
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

}  // namespace

std::vector<std::string> worker_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const NodePlace& node,
                                            const WorkerPlace& place) {
  Variables variables;
  for (const std::string& entry : base) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  set_torchruns(variables, options, node, place.local_rank);
  const int rank = node.base_rank + place.local_rank;
  variables["COHORT_RESTART_COUNT"] = std::to_string(node.restart_count);
  variables["COHORT_LOG_DIR"] = place.log_dir;
  variables["COHORT_ERROR_FILE"] = error_file(place.log_dir, rank);
  variables[kTraceFileVariable] = trace_file(place.log_dir, rank);
  variables.erase("COHORT_STORE_FD");
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  if (place.store_fd >= 0) variables["COHORT_STORE_FD"] = std::to_string(place.store_fd);
  std::string& threads = variables["OMP_NUM_THREADS"];
  if (threads.empty()) threads = std::to_string(place.num_threads);
  if (!options.interface.empty()) {
    variables["GLOO_SOCKET_IFNAME"] = options.interface;
    variables["NCCL_SOCKET_IFNAME"] = options.interface;
  }
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
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

std::string log_file(const std::string& log_dir, int rank, const std::string& stream) {
  return log_dir + "/rank" + std::to_string(rank) + "." + stream + ".log";
}

}  // namespace cohort::launch
