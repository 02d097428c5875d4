// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/cores.h"

#include <algorithm>
#include <cstdlib>
#include <sched.h>

#include "cohort/base/error.h"
#include "cohort/base/gpu_monitor.h"
#include "cohort/launch/gpu_nodes.h"
#include "cohort/launch/to_int.h"

namespace cohort::launch {
namespace {

constexpr const char* kVisibleGpus = "CUDA_VISIBLE_DEVICES";

std::string ranges(const std::vector<int>& cores) {
  std::string text;
  for (size_t first = 0; first < cores.size();) {
    size_t last = first;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(cores[first]);
    if (last > first) text += "-" + std::to_string(cores[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace

std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

int count_gpus() {
  const auto visible = visible_gpus();
  return static_cast<int>(visible ? visible->size() : GpuMonitor().sample().size());
}

int parse_nproc_per_node(const std::string& text) {
  if (text == "cpu" || text == "auto") return static_cast<int>(usable_cores().size());
  if (text == "gpu") {
    if (const int gpus = count_gpus(); gpus > 0) return gpus;
    const char* visible = std::getenv(kVisibleGpus);
    throw ConfigError("--nproc-per-node gpu: expected a GPU on this node, got none: " +
                      (visible != nullptr
                           ? std::string(kVisibleGpus) + "=" + visible
                           : "the NVIDIA driver's libnvidia-ml.so.1 is missing, or finds none"));
  }
  if (const auto number = to_int(text)) return *number;
  throw ConfigError("--nproc-per-node: expected a number, auto, cpu or gpu, got " + text);
}

std::vector<std::vector<int>> share_cores(const std::vector<int>& cores, int num_workers) {
  const size_t share = cores.size() / static_cast<size_t>(num_workers);
  if (share == 0) {
    throw ConfigError("--bind-cores cores: expected a core for each worker, got " +
                      std::to_string(cores.size()) + " for " + std::to_string(num_workers));
  }
  std::vector<std::vector<int>> shares;
  for (auto first = cores.begin(); shares.size() < static_cast<size_t>(num_workers);
       first += static_cast<std::ptrdiff_t>(share)) {
    shares.emplace_back(first, first + static_cast<std::ptrdiff_t>(share));
  }
  return shares;
}

std::vector<std::vector<int>> bound_cores(const RunOptions& options) {
  switch (options.bind_cores) {
    case BindCores::kCores:
      return share_cores(usable_cores(), options.nproc_per_node);
    case BindCores::kNode:
      return cores_beside_gpus(usable_cores(), options.nproc_per_node, options.machine_root);
    case BindCores::kNone:
      break;
  }
  return {};
}

int threads_each(const std::vector<std::vector<int>>& shares) {
  std::ptrdiff_t threads = CPU_SETSIZE;
  for (const auto& share : shares)
    threads = std::min(threads, std::ssize(share) / std::ranges::count(shares, share));
  return static_cast<int>(std::max<std::ptrdiff_t>(threads, 1));
}

std::string describe_cores(const std::vector<std::vector<int>>& shares,
                           const std::string& threads) {
  const auto counted = [](const std::string& number, const std::string& noun) {
    return number + " " + noun + (number == "1" ? "" : "s");
  };
  std::string text = counted(std::to_string(shares.size()), "worker") + ", " +
                     counted(threads, "thread") + " each, cores ";
  for (size_t i = 0; i < shares.size(); ++i) text += (i == 0 ? "" : " | ") + ranges(shares[i]);
  return text;
}

}  // namespace cohort::launch
