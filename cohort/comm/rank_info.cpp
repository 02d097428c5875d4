// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/rank_info.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <utility>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/slurm.h"

namespace cohort::comm {
namespace {

constexpr int kMaxRanks = 1 << 20;
const char* const kOptions = "options";
const char* const kTorchrun = "torchrun's environment";
const char* const kSlurm = "Slurm's environment";

std::optional<int> env_rank(const char* name) {
  const auto value = env_int(name, 0, kMaxRanks);
  return value ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
}

// Names of `required` that are unset, joined; empty if none is.
std::string missing_of(std::initializer_list<const char*> required) {
  std::string missing;
  for (const char* name : required) {
    if (!env_string(name)) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  return missing;
}

[[noreturn]] void incomplete_environment(const std::string& found, const std::string& missing) {
  throw ConfigError(found + " is set but " + missing + " is not: set all of them, or none");
}

void check(const RankInfo& info) {
  if (info.rank < 0 || info.rank >= info.world_size) {
    throw ConfigError("rank " + std::to_string(info.rank) + " of world size " +
                      std::to_string(info.world_size) + " (" + info.source +
                      "): expected 0 <= rank < world size");
  }
  if (info.local_rank < 0 || info.local_rank >= info.local_world_size) {
    throw ConfigError("local rank " + std::to_string(info.local_rank) + " of " +
                      std::to_string(info.local_world_size) + " (" + info.source +
                      "): expected 0 <= local rank < local world size");
  }
}

// What --dist-url says.
struct DistUrl {
  std::string host;
  int port = 0;
  std::string file;
};

DistUrl parse_dist_url(const std::string& url) {
  const auto fail = [&] {
    throw ConfigError("--dist-url " + url + ": expected tcp://host:port, file:///path or env://");
  };
  if (url == "env://") return {};
  if (url.starts_with("file:///") && url.size() > 8)
    return {.host = {}, .port = 0, .file = url.substr(7)};
  const size_t colon = url.rfind(':');
  if (!url.starts_with("tcp://") || colon <= 6) fail();
  DistUrl result;
  result.host = url.substr(6, colon - 6);
  if (result.host.starts_with("[") && result.host.ends_with("]")) {
    result.host = result.host.substr(1, result.host.size() - 2);  // an IPv6 address
  }
  const char* end = url.data() + url.size();
  const auto [stop, error] = std::from_chars(url.data() + colon + 1, end, result.port);
  if (error != std::errc() || stop != end || result.port < 1 || result.port > 65535 ||
      result.host.empty())
    fail();
  return result;
}

void take_dist_url(RankInfo& info, const RankInfoOptions& options) {
  if (!options.dist_url) return;
  if (options.master_addr || options.master_port) {
    throw ConfigError("--dist-url and --addr or --port: give one of them");
  }
  const DistUrl url = parse_dist_url(*options.dist_url);
  if (!url.host.empty()) {
    info.master_addr = url.host;
    info.master_port = url.port;
  }
  info.store_file = url.file;
}

// `variable`, which `flag` sets as well, is missing.
[[noreturn]] void no_master(const RankInfo& info, const std::string& flag,
                            const std::string& variable) {
  if (info.source != kOptions) incomplete_environment(info.source, variable);
  incomplete_environment("--rank", flag + " (or --dist-url, or " + variable + ")");
}

// The address of rank 0's store; all launchers but Paddle's leave it to MASTER_ADDR, MASTER_PORT.
void take_master(RankInfo& info, const RankInfoOptions& options) {
  const bool by_url = options.dist_url && *options.dist_url != "env://";
  take_dist_url(info, options);
  if (!info.store_file.empty()) return;
  if (options.master_addr) info.master_addr = *options.master_addr;
  if (options.master_port) info.master_port = *options.master_port;
  if (info.master_addr.empty()) info.master_addr = env_string("MASTER_ADDR").value_or("");
  if (info.master_port == 0 || (info.source == kSlurm && !by_url && !options.master_port)) {
    // Slurm's port is a guess from the job's number: a variable goes before it.
    info.master_port =
        static_cast<int>(env_int("MASTER_PORT", 1, 65535).value_or(info.master_port));
  }
  if (info.world_size == 1) return;
  if (info.master_addr.empty()) no_master(info, "--addr", "MASTER_ADDR");
  if (info.master_port == 0) no_master(info, "--port", "MASTER_PORT");
  if (info.master_port < 1 || info.master_port > 65535) {
    throw ConfigError("port " + std::to_string(info.master_port) + " (" + info.source +
                      "): expected 1 to 65535");
  }
  if (by_url) return;  // what the launcher listens on is MASTER_PORT
  if (info.rank == 0) info.store_fd = env_rank("COHORT_STORE_FD");
  info.agent_store =
      env_string("TORCHELASTIC_USE_AGENT_STORE") == "True" && info.source == kTorchrun;
}

// `names` of the environment joined by dots, as far as they are set.
std::string joined(std::initializer_list<const char*> names) {
  std::string text;
  for (const char* name : names) {
    if (const auto value = env_string(name)) text += (text.empty() ? "" : ".") + *value;
  }
  return text;
}

RankInfo from_options(const RankInfoOptions& options) {
  if (!options.rank) {
    incomplete_environment(options.world_size ? "--world-size" : "--nproc-per-node", "--rank");
  }
  if (!options.world_size) incomplete_environment("--rank", "--world-size");
  RankInfo info;
  info.source = kOptions;
  info.rank = *options.rank;
  info.world_size = *options.world_size;
  info.finds_host = !options.nproc_per_node && info.world_size > 1;
  if (options.nproc_per_node) {
    info.local_world_size = *options.nproc_per_node;
    const auto local_rank = env_rank("LOCAL_RANK");
    if (!local_rank) incomplete_environment("--nproc-per-node", "LOCAL_RANK");
    info.local_rank = *local_rank;
    info.rank = *options.rank * *options.nproc_per_node + *local_rank;
    info.world_size = *options.world_size * *options.nproc_per_node;
  }
  return info;
}

RankInfo from_torchrun() {
  const std::string missing = missing_of({"RANK", "WORLD_SIZE"});
  if (!missing.empty()) incomplete_environment(missing == "RANK" ? "WORLD_SIZE" : "RANK", missing);
  RankInfo info;
  info.source = kTorchrun;
  info.job = joined({"TORCHELASTIC_RUN_ID", "COHORT_ROUND"});
  info.rank = *env_rank("RANK");
  info.world_size = *env_rank("WORLD_SIZE");
  const auto local_rank = env_rank("LOCAL_RANK"), local_size = env_rank("LOCAL_WORLD_SIZE");
  if (local_rank && !local_size) incomplete_environment("LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (local_size && !local_rank) incomplete_environment("LOCAL_WORLD_SIZE", "LOCAL_RANK");
  info.finds_host = !local_rank && info.world_size > 1;
  info.local_rank = local_rank.value_or(0);
  info.local_world_size = local_size.value_or(1);
  return info;
}

RankInfo from_open_mpi() {
  const std::string missing =
      missing_of({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE"});
  if (!missing.empty()) incomplete_environment("Open MPI's OMPI_COMM_WORLD_*", missing);
  RankInfo info;
  info.source = "Open MPI's environment";
  info.job = joined({"PMIX_NAMESPACE"});
  info.rank = *env_rank("OMPI_COMM_WORLD_RANK");
  info.world_size = *env_rank("OMPI_COMM_WORLD_SIZE");
  info.local_rank = *env_rank("OMPI_COMM_WORLD_LOCAL_RANK");
  info.local_world_size = *env_rank("OMPI_COMM_WORLD_LOCAL_SIZE");
  return info;
}

// The first of `names` that is set, and its value.
std::optional<std::pair<std::string, std::string>> first_set(
    std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const auto value = env_string(name))
      return std::pair<std::string, std::string>(name, *value);
  }
  return std::nullopt;
}

// Below the range that systems give out for outgoing connections; the same for all tasks of a step.
int slurm_port() {
  const auto job = env_int("SLURM_JOB_ID", 0);
  if (!job) return 0;
  const int64_t step = env_int("SLURM_STEP_ID", 0).value_or(0);
  return static_cast<int>(12'000 + (*job * 16 + step % 16) % 20'000);
}

int slurm_local_world_size(const RankInfo& info) {
  const auto counts = first_set({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  const auto node = env_rank("SLURM_NODEID");
  if (counts && node) {
    const auto tasks = expand_task_counts(counts->second, counts->first);
    if (static_cast<size_t>(*node) < tasks.size()) return tasks[static_cast<size_t>(*node)];
  }
  const int num_nodes = std::max(1, env_rank("SLURM_NNODES").value_or(1));
  return std::max(info.local_rank + 1, (info.world_size + num_nodes - 1) / num_nodes);
}

RankInfo from_slurm() {
  std::string missing = missing_of({"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"});
  const auto nodes = first_set({"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"});
  if (!nodes) missing += std::string(missing.empty() ? "" : ", ") + "SLURM_NODELIST";
  if (!missing.empty()) incomplete_environment("SLURM_PROCID", missing);
  RankInfo info;
  info.source = kSlurm;
  info.job = joined({"SLURM_JOB_ID", "SLURM_STEP_ID"});
  info.rank = *env_rank("SLURM_PROCID");
  info.world_size = *env_rank("SLURM_NTASKS");
  info.local_rank = *env_rank("SLURM_LOCALID");
  info.local_world_size = slurm_local_world_size(info);
  const auto hosts = expand_node_list(nodes->second, nodes->first);
  if (!env_string("MASTER_ADDR")) info.master_addr = hosts.front();
  info.master_port = slurm_port();
  return info;
}

RankInfo from_paddle() {
  const auto count = first_set({"PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS", "PADDLE_TRAINERS"});
  // Before what else is missing, which hangs on it.
  if (count) env_int(count->first.c_str(), 1, kMaxRanks);
  const bool alone = count && count->second == "1";  // One process needs no endpoints.
  std::string missing = alone ? missing_of({"PADDLE_TRAINER_ID"})
                              : missing_of({"PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS"});
  if (!count) missing += std::string(missing.empty() ? "" : ", ") + "PADDLE_TRAINERS_NUM";
  if (!missing.empty()) {
    incomplete_environment(env_string("PADDLE_TRAINER_ID") ? "PADDLE_TRAINER_ID" : count->first,
                           missing);
  }
  if (alone && !env_string("PADDLE_TRAINER_ENDPOINTS")) {
    RankInfo info;
    info.rank = *env_rank("PADDLE_TRAINER_ID");
    info.source = "Paddle's environment";
    return info;
  }
  const std::string list = *env_string("PADDLE_TRAINER_ENDPOINTS");
  std::vector<std::string> endpoints;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    endpoints.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  const int rank = *env_rank("PADDLE_TRAINER_ID");
  const int world_size = *env_rank(count->first.c_str());
  if (static_cast<int>(endpoints.size()) != world_size || rank >= world_size) {
    throw ConfigError("PADDLE_TRAINER_ENDPOINTS names " + std::to_string(endpoints.size()) +
                      " trainers: expected PADDLE_TRAINERS_NUM=" + std::to_string(world_size) +
                      " and PADDLE_TRAINER_ID below it");
  }
  RankInfo info = rank_info_from_endpoints(endpoints, rank, "PADDLE_TRAINER_ENDPOINTS");
  info.source = "Paddle's environment";
  return info;
}

RankInfo one_process() {
  RankInfo info;
  info.source = "no launcher: one process";
  return info;
}

}  // namespace

RankInfo rank_info_from_endpoints(const std::vector<std::string>& endpoints, int rank,
                                  const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    std::string list;
    for (const std::string& endpoint : endpoints) list += (list.empty() ? "" : ",") + endpoint;
    throw ConfigError(name + "=" + list + ": " + why);
  };
  RankInfo info;
  info.source = name;
  info.rank = rank;
  info.world_size = static_cast<int>(endpoints.size());
  if (rank < 0 || rank >= info.world_size) refuse("there is no rank " + std::to_string(rank));
  std::vector<std::string> hosts;
  for (const std::string& endpoint : endpoints) {
    const size_t colon = endpoint.rfind(':');
    if (colon == std::string::npos) refuse("expected host:port,host:port");
    const bool bracketed = endpoint.starts_with("[") && colon > 1 && endpoint[colon - 1] == ']';
    hosts.push_back(bracketed ? endpoint.substr(1, colon - 2) : endpoint.substr(0, colon));
    if (hosts.size() > 1) continue;
    const char* const begin = endpoint.data() + colon + 1;
    const char* const end = endpoint.data() + endpoint.size();
    const auto [stop, error] = std::from_chars(begin, end, info.master_port);
    if (error != std::errc() || stop != end || info.master_port < 1 || info.master_port > 65535)
      refuse("expected a port, got '" + std::string(begin, end) + "'");
    info.master_addr = hosts.front();
  }
  const std::string& own = hosts[static_cast<size_t>(rank)];
  info.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, own));
  info.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), own));
  return info;
}

RankInfo rank_info_from_environment(const RankInfoOptions& options) {
  RankInfo info;
  if (options.rank || options.world_size || options.nproc_per_node) {
    info = from_options(options);
  } else if (env_string("RANK") || env_string("WORLD_SIZE")) {
    info = from_torchrun();
  } else if (env_string("OMPI_COMM_WORLD_SIZE") || env_string("OMPI_COMM_WORLD_RANK")) {
    info = from_open_mpi();
  } else if (env_string("SLURM_PROCID")) {
    info = from_slurm();
  } else if (first_set({"PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS"})) {
    info = from_paddle();
  } else {
    // An incomplete environment must not start jobs of one process each.
    if (options.master_addr || options.master_port)
      incomplete_environment("--addr or --port", "--rank");
    if (options.dist_url)
      incomplete_environment("--dist-url " + *options.dist_url, "--rank, or RANK,");
    for (const char* name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      if (env_string(name)) incomplete_environment(name, "RANK");
    }
    info = one_process();
  }
  check(info);
  take_master(info, options);
  return info;
}

std::optional<std::pair<std::string, std::string>> launcher_rank_variable() {
  return first_set({"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PADDLE_TRAINER_ID"});
}

int device_index(const RankInfo& info, int num_devices) {
  if (num_devices == 1) return 0;
  if (info.finds_host) {
    throw ConfigError(
        "LOCAL_RANK is not set: expected it, or the rank info of a connected process group");
  }
  if (info.local_rank >= num_devices) {
    throw ConfigError("local rank " + std::to_string(info.local_rank) +
                      " has no device: expected at most " + std::to_string(num_devices) +
                      " ranks on this host, one for each of its devices");
  }
  return info.local_rank;
}

}  // namespace cohort::comm
