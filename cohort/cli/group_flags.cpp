// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/group_flags.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <algorithm>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/cli/flag_list.h"
#include "cohort/cli/milliseconds.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/accelerator.h"
#include "cohort/comm/backend.h"

namespace cohort::cli {
namespace {

const char* const kBackendText =
    "Backend of the collectives (auto: nccl for cuda, else shm among ranks of one host, "
    "hierarchical or gloo among those of several; gloo for cuda is slow, but takes several ranks "
    "on one card)";

// A backend of another device would carry nothing, and the group's of CPU tensors everything.
void check_backend(const std::string& name, at::Device device) {
  const c10::DeviceType served = comm::find_backend(name).device;
  if (served == device.type()) return;
  throw ConfigError("--dist-backend " + name + ": expected a backend of " +
                    c10::DeviceTypeName(device.type(), /*lower_case=*/true) +
                    " tensors, for this program computes on " + device.str() + ", got one of " +
                    c10::DeviceTypeName(served, /*lower_case=*/true) + " tensors");
}

constexpr const char* kSection = "Ranks";

void add_device_flags(CLI::App& app, GroupFlags& flags) {
  app.add_option("--device", flags.device,
                 "Where to compute: cpu, cuda (the card of this rank's number on its host) or "
                 "cuda:N")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(kSection);
  app.add_option(
         "--devices", flags.devices,
         "CUDA devices by number, one for each rank of this host, in the order of local ranks")
      ->type_name("N")
      ->excludes("--device")
      ->group(kSection);
  app.add_flag(
         "--allow-tf32", flags.allow_tf32,
         "CUDA: multiply float32 matrices with mantissas of 10 bits, as PyTorch's convolutions "
         "do without a flag")
      ->group(kSection);
}

// Whether each rank may have a value of its own, or none.
bool may_differ(const FlagInfo& flag, const std::vector<std::string>& own) {
  const std::string group = flag.option->get_group();
  return flag.names.empty() || group == kSection || group == kSecurity || group == kOtherFlags ||
         std::ranges::find(own, flag.names.back()) != own.end();
}

// A flag as it was written.
struct WrittenFlag {
  std::string name;
  std::string text;
  bool is_path = false;  // Of this host, and nothing else.
};

std::string text_of(const FlagInfo& flag) {
  std::string value;
  for (const std::string& each :
       flag.option->count() > 0 ? flag.option->results() : flag.default_values)
    value += (value.empty() ? "" : " ") + each;
  return value.empty() ? "no value" : value;
}

// The command, and each of its flags with its value; one program has the same ones on all ranks.
std::vector<WrittenFlag> written_flags(const CLI::App& command,
                                       const std::vector<std::string>& own) {
  std::vector<WrittenFlag> values{{"the command", command.get_name()}};
  for (const FlagInfo& flag : flags_of(command)) {
    if (may_differ(flag, own)) continue;
    const bool is_path = flag.usage.empty() && (flag.value == kFile || flag.value == kFolder);
    values.push_back({flag.names.back(), text_of(flag), is_path});
  }
  return values;
}

}  // namespace

// NCCL says so in the first collective, in its own words, and not of which ranks.
void check_cards_differ(const comm::ProcessGroup& group, const std::string& card) {
  const auto cards = group.all_gather_object(card);
  const auto hosts = group.hosts();
  for (size_t rank = 1; rank < cards.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      if (cards[rank].empty() || cards[rank] != cards[other] || hosts[rank] != hosts[other])
        continue;
      throw ConfigError("ranks " + std::to_string(other) + " and " + std::to_string(rank) +
                        " compute on one card of host " +
                        hosts[rank].substr(0, hosts[rank].find('/')) + ", with the UUID " +
                        cards[rank] + ", and NCCL takes one rank on each: expected fewer ranks, " +
                        "or --dist-backend gloo, which is slow");
    }
  }
}

void check_same_flags(const comm::ProcessGroup& group, const CLI::App& command,
                      const std::vector<std::string>& own_flags) {
  const auto flags = written_flags(command, own_flags);
  std::string own;  // No argument of a program holds a zero.
  for (const WrittenFlag& flag : flags) own += flag.text + '\0';
  const auto all = group.all_gather_object(own);
  const auto hosts = group.hosts();
  std::vector<std::vector<std::string>> texts;
  for (const std::string& each : all) texts.push_back(split(each, '\0'));
  const auto expect_same = [&](size_t first, size_t rank) {
    const auto &a = texts[first], &b = texts[rank];
    for (size_t i = 0; i < flags.size() && i < a.size() && i < b.size(); ++i) {
      // Another host may have it elsewhere.
      const bool both_given = a[i] != "no value" && b[i] != "no value";
      if (a[i] == b[i] || (flags[i].is_path && both_given && hosts[first] != hosts[rank])) continue;
      throw ConfigError(flags[i].name + ": expected the same on all ranks" +
                        (flags[i].is_path && both_given ? " of a host" : "") + ", got " + a[i] +
                        " on rank " + std::to_string(first) + " and " + b[i] + " on rank " +
                        std::to_string(rank));
    }
  };
  for (size_t rank = 1; rank < all.size(); ++rank) {
    expect_same(0, rank);
    expect_same(static_cast<size_t>(std::ranges::find(hosts, hosts[rank]) - hosts.begin()), rank);
  }
}

void GroupFlags::add_to(CLI::App& app, Devices allowed) {
  app.add_option(
         "--rank", rank_info.rank,
         "This process's rank (with --nproc-per-node: this node's; default: the launcher's)")
      ->group(kSection);
  app.add_option("--world-size", rank_info.world_size,
                 "Processes (with --nproc-per-node: nodes; default: the launcher's)")
      ->group(kSection);
  app.add_option("--nproc-per-node", rank_info.nproc_per_node,
                 "Processes of each node; LOCAL_RANK must be set")
      ->group(kSection);
  app.add_option("--dist-url", rank_info.dist_url,
                 "Rendezvous address: tcp://host:port, file:///path or env:// (default: env://)")
      ->type_name("URL")
      ->group(kSection);
  app.add_option("--addr", rank_info.master_addr, "Host of rank 0 (default: MASTER_ADDR)")
      ->type_name("HOST")
      ->group(kSection);
  app.add_option("--port", rank_info.master_port, "Port of rank 0's store (default: MASTER_PORT)")
      ->type_name("PORT")
      ->group(kSection);
  app.add_option("--interface", group.interface,
                 "Network interface of the backend (default: GLOO_SOCKET_IFNAME or "
                 "NCCL_SOCKET_IFNAME, else by route)")
      ->type_name("NAME")
      ->group(kSection);
  if (allowed == Devices::kAny) add_device_flags(app, *this);
  app.add_option("--dist-backend", backend, kBackendText)
      ->type_name("NAME")
      ->capture_default_str()
      ->group(kSection);
  app.add_option("--rendezvous-timeout", rendezvous_timeout_s,
                 "Time limit until all ranks have joined")
      ->type_name(kSeconds)
      ->check(time_limit())
      ->capture_default_str()
      ->group(kSection);
  app.add_option("--timeout", timeout_s, "Time limit of one collective")
      ->type_name(kSeconds)
      ->check(time_limit())
      ->capture_default_str()
      ->group(kSection);
  app.add_option("--cpu-threads", cpu_threads,
                 "Threads of this rank (0: OMP_NUM_THREADS, else all cores)")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->group(kSection);
}

void GroupFlags::choose_device(const comm::RankInfo& info) {
  if (!devices.empty()) {
    if (info.finds_host)
      throw ConfigError("--devices: expected LOCAL_RANK, which `cohort run` and torchrun set");
    if (info.local_world_size != std::ssize(devices)) {
      throw ConfigError("--devices: expected one for each rank of this host, " +
                        std::to_string(info.local_world_size) + ", got " +
                        std::to_string(devices.size()));
    }
    const int index = comm::device_index(info, static_cast<int>(devices.size()));
    device = "cuda:" + std::to_string(devices[static_cast<size_t>(index)]);
  }
  const bool chooses = backend == "auto";
  if (backend == "nccl" && computes_on_cpu())
    throw ConfigError("--dist-backend nccl: expected --device cuda, for it serves CUDA tensors");
  // A file of a backend may bring its device's driver; NCCL's needs CUDA, which is loaded then.
  if (!chooses && backend != "nccl") comm::find_backend(backend);
  group.device = comm::init_accelerator(device, info);
  group.backend = backend == "gloo" && group.device->is_cuda() ? "gloo_cuda" : backend;
  check_backend(!chooses                  ? group.backend
                : group.device->is_cuda() ? "nccl"
                                          : "gloo",
                *group.device);
  if (allow_tf32 && !group.device->is_cuda())
    throw ConfigError("--allow-tf32: expected a CUDA --device, got " + group.device->str());
  if (allow_tf32) at::globalContext().setAllowTF32CuBLAS(true);
  if (cpu_threads > 0) at::set_num_threads(cpu_threads);
}

comm::ProcessGroup GroupFlags::stay_alone() {
  const comm::RankInfoOptions& ranks = rank_info;
  const GroupFlags defaults;
  if (ranks.rank || ranks.world_size || ranks.nproc_per_node || ranks.master_addr ||
      ranks.master_port || ranks.dist_url || timeout_s != defaults.timeout_s ||
      rendezvous_timeout_s != defaults.rendezvous_timeout_s || !group.interface.empty()) {
    throw ConfigError(
        "--rank, --world-size, --nproc-per-node, --dist-url, --addr, --port, --interface, "
        "--timeout, --rendezvous-timeout: expected none of them, this process has no process group "
        "(COHORT_PROCESS_GROUP=none, which `cohort run` sets where trainers restart or end alone)");
  }
  // One of several processes of this host may be alone in its group.
  const comm::RankInfo place{
      .local_rank = static_cast<int>(env_int("LOCAL_RANK").value_or(0)),
      .local_world_size = static_cast<int>(env_int("LOCAL_WORLD_SIZE").value_or(1))};
  choose_device(place);
  return comm::ProcessGroup(comm::RankInfo{}, group);
}

comm::ProcessGroup GroupFlags::connect() {
  group.rendezvous_timeout = to_milliseconds(rendezvous_timeout_s);
  group.timeout = to_milliseconds(timeout_s);
  const comm::RankInfo info = comm::rank_info_from_environment(rank_info);
  choose_device(info);
  comm::ProcessGroup ranks(info, group);
  if (ranks.backend() == "nccl") check_cards_differ(ranks, comm::card_uuid(ranks.device().index()));
  return ranks;
}

}  // namespace cohort::cli
