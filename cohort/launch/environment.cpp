#include "cohort/launch/environment.h"

#include <algorithm>
#include <map>
#include <sched.h>
#include <unistd.h>

namespace cohort::launch {

std::vector<std::string> worker_environment(const std::vector<std::string>& base,
                                            const RunOptions& options, const WorkerPlace& place) {
  std::map<std::string, std::string> variables;
  for (const std::string& entry : base) {
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  const int rank = options.rank_of(place.local_rank);
  variables["RANK"] = std::to_string(rank);
  variables["LOCAL_RANK"] = std::to_string(place.local_rank);
  variables["WORLD_SIZE"] = std::to_string(options.world_size());
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.nproc_per_node);
  variables["GROUP_RANK"] = std::to_string(options.node_rank);
  variables["GROUP_WORLD_SIZE"] = std::to_string(options.nnodes);
  variables["MASTER_ADDR"] = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  variables["MASTER_PORT"] = std::to_string(place.master_port);
  variables["COHORT_LOG_DIR"] = place.log_dir;
  variables["COHORT_ERROR_FILE"] = error_file(place.log_dir, rank);
  variables.erase("COHORT_STORE_FD");
  if (place.store_fd >= 0) variables["COHORT_STORE_FD"] = std::to_string(place.store_fd);
  std::string& threads = variables["OMP_NUM_THREADS"];
  if (threads.empty()) {
    threads = std::to_string(std::max(1, place.num_cores / options.nproc_per_node));
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

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string error_file(const std::string& log_dir, int rank) {
  return log_dir + "/rank" + std::to_string(rank) + ".error.json";
}

std::string log_file(const std::string& log_dir, int rank, const std::string& stream) {
  return log_dir + "/rank" + std::to_string(rank) + "." + stream + ".log";
}

}  // namespace cohort::launch
