// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/group_flags.h"

#include <ATen/Parallel.h>

#include "cohort/base/error.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/backend.h"

namespace cohort::cli {
namespace {

std::chrono::milliseconds milliseconds(const char* flag, double seconds) {
  if (!(seconds > 0 && seconds < 1e7)) {
    throw ConfigError(std::string(flag) + " " + std::to_string(seconds) +
                      ": expected more than 0 seconds");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// All programs compute on the CPU: a backend of another device would carry nothing, and Gloo
// everything instead.
void check_backend(const std::string& name) {
  const c10::DeviceType device = comm::find_backend(name).device;
  if (device == c10::DeviceType::CPU) return;
  throw ConfigError("--dist-backend " + name +
                    ": expected a backend of CPU tensors (gloo, mpi), for this program computes on "
                    "the CPU, got one of " +
                    c10::DeviceTypeName(device, /*lower_case=*/true) + " tensors");
}

}  // namespace

void GroupFlags::add_to(CLI::App& app) {
  const std::string section = "Ranks";
  app.add_option("--rank", rank_info.rank,
                 "This process's rank (with --nproc-per-node: this node's)")
      ->group(section);
  app.add_option("--world-size", rank_info.world_size, "Processes (with --nproc-per-node: nodes)")
      ->group(section);
  app.add_option("--nproc-per-node", rank_info.nproc_per_node,
                 "Processes of each node; LOCAL_RANK must be set")
      ->group(section);
  app.add_option("--dist-url", rank_info.dist_url,
                 "Rendezvous address: tcp://host:port, file:///path or env://")
      ->type_name("URL")
      ->group(section);
  app.add_option("--addr", rank_info.master_addr, "Host of rank 0")
      ->type_name("HOST")
      ->group(section);
  app.add_option("--port", rank_info.master_port, "Port of rank 0's store")
      ->type_name("PORT")
      ->group(section);
  app.add_option("--interface", group.interface,
                 "Network interface of the backend (default: GLOO_SOCKET_IFNAME, else by route)")
      ->type_name("NAME")
      ->group(section);
  app.add_option("--dist-backend", group.backend, "Backend of the collectives")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(section);
  app.add_option("--rendezvous-timeout", rendezvous_timeout_s,
                 "Time limit until all ranks have joined")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(section);
  app.add_option("--timeout", timeout_s, "Time limit of one collective")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(section);
  app.add_option("--cpu-threads", cpu_threads,
                 "Threads of this rank (0: OMP_NUM_THREADS, else all cores)")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->group(section);
}

comm::ProcessGroup GroupFlags::stay_alone() const {
  if (cpu_threads > 0) at::set_num_threads(cpu_threads);
  return comm::ProcessGroup(comm::RankInfo{});
}

comm::ProcessGroup GroupFlags::connect() {
  group.rendezvous_timeout = milliseconds("--rendezvous-timeout", rendezvous_timeout_s);
  group.timeout = milliseconds("--timeout", timeout_s);
  check_backend(group.backend);
  if (cpu_threads > 0) at::set_num_threads(cpu_threads);
  return comm::ProcessGroup(comm::rank_info_from_environment(rank_info), group);
}

}  // namespace cohort::cli
