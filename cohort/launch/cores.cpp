#include "cohort/launch/cores.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sched.h>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/launch/to_int.h"

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

// As CUDA reads it: the list ends at the first entry that is no device.
int count_visible(const std::string& text) {
  int count = 0;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (entry.empty() || entry.starts_with("-") || entry == "NoDevFiles") break;
    ++count;
  }
  return count;
}

bool is_gpu_device(const std::string& name) {
  const std::string prefix = "nvidia";
  return name.starts_with(prefix) && name.size() > prefix.size() &&
         std::all_of(name.begin() + static_cast<std::ptrdiff_t>(prefix.size()), name.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

template <typename Counts>
int count_entries(const char* folder, Counts counts) {
  std::error_code ignored;
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (counts(entry.path().filename().string())) ++count;
  }
  return count;
}

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

int num_gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) return count_visible(visible);
  const int listed =
      count_entries("/proc/driver/nvidia/gpus", [](const std::string&) { return true; });
  return listed > 0 ? listed : count_entries("/dev", is_gpu_device);
}

int parse_nproc_per_node(const std::string& text) {
  const int num_cores = static_cast<int>(usable_cores().size());
  if (text == "cpu") return num_cores;
  if (text == "auto") return num_gpus() > 0 ? num_gpus() : num_cores;
  if (text == "gpu") {
    if (const int count = num_gpus()) return count;
    throw ConfigError(
        "--nproc-per-node gpu: expected a GPU, found none (CUDA_VISIBLE_DEVICES, "
        "/proc/driver/nvidia/gpus, /dev/nvidia[0-9]*)");
  }
  if (const auto number = to_int(text)) return *number;
  throw ConfigError("--nproc-per-node: expected a number, auto, gpu or cpu, got " + text);
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
