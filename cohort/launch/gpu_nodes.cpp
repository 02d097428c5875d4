// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/gpu_nodes.h"

#include <algorithm>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <system_error>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/launch/to_int.h"

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

struct InstalledGpu {
  std::string address;  // "0000:0f:00.0"
  std::string uuid;     // "GPU-8932f937-..."; empty: not told.
};

[[noreturn]] void refuse_binding(const std::string& expected, const std::string& got) {
  throw ConfigError("--numa-binding node: expected " + expected + ", got " + got);
}

// The text after `name` and spaces; nothing on another line.
std::optional<std::string> value_of(const std::string& line, std::string_view name) {
  if (!line.starts_with(name)) return std::nullopt;
  return line.substr(std::min(line.find_first_not_of(" \t", name.size()), line.size()));
}

// The driver has a folder for each GPU of the machine. CUDA counts those whose device file a device
// cgroup lets this process open. Names of one length sort by bus.
std::vector<InstalledGpu> installed_gpus(const std::string& root) {
  std::vector<InstalledGpu> gpus;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(root + "/proc/driver/nvidia/gpus", error)) {
    InstalledGpu gpu{.address = folder.path().filename().string(), .uuid = {}};
    std::ifstream file(folder.path() / "information");
    bool usable = true;
    for (std::string line; std::getline(file, line);) {
      if (const auto uuid = value_of(line, "GPU UUID:")) gpu.uuid = *uuid;
      if (const auto minor = value_of(line, "Device Minor:")) {
        const std::string device = root + "/dev/nvidia" + *minor;
        // The kernel asks the cgroup for this, too; to open the file would start the GPU.
        usable = ::faccessat(AT_FDCWD, device.c_str(), R_OK | W_OK, AT_EACCESS) == 0;
      }
    }
    if (usable) gpus.push_back(gpu);
  }
  std::ranges::sort(gpus, {}, &InstalledGpu::address);
  return gpus;
}

// As CUDA reads an entry of CUDA_VISIBLE_DEVICES: a number, or a UUID's unique beginning.
InstalledGpu find_gpu(const std::vector<InstalledGpu>& gpus, const std::string& entry) {
  const auto number = to_int(entry);
  if (number && *number < static_cast<int>(gpus.size())) return gpus[static_cast<size_t>(*number)];
  std::vector<InstalledGpu> found;
  if (entry.starts_with("GPU-")) {
    std::ranges::copy_if(gpus, std::back_inserter(found),
                         [&](const InstalledGpu& gpu) { return gpu.uuid.starts_with(entry); });
  }
  if (found.size() == 1) return found.front();
  refuse_binding("CUDA_VISIBLE_DEVICES to list numbers below " + std::to_string(gpus.size()) +
                     ", this node's GPUs, or their UUIDs",
                 entry.empty() ? "an empty entry" : entry);
}

std::vector<InstalledGpu> gpus_in_use(const std::string& root) {
  const std::vector<InstalledGpu> gpus = installed_gpus(root);
  const auto visible = visible_gpus();
  if (!visible) return gpus;
  std::vector<InstalledGpu> seen;
  for (const std::string& entry : *visible) seen.push_back(find_gpu(gpus, entry));
  return seen;
}

std::string first_line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int node_of(const InstalledGpu& gpu, const std::string& root) {
  const std::string file = root + "/sys/bus/pci/devices/" + gpu.address + "/numa_node";
  const auto node = to_int(first_line_of(file));
  if (!node) refuse_binding("the GPU's NUMA node in " + file, "none");
  return std::max(*node, 0);
}

// "0-3,8": the kernel's form.
std::vector<int> read_core_list(const std::string& text) {
  std::vector<int> cores;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t dash = entry.find('-');
    const auto first = to_int(std::string_view(entry).substr(0, dash));
    const auto last =
        dash == std::string::npos ? first : to_int(std::string_view(entry).substr(dash + 1));
    for (int core = first.value_or(0); first && last && core <= *last; ++core)
      cores.push_back(core);
  }
  return cores;
}

}  // namespace

std::optional<std::vector<std::string>> visible_gpus() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return std::nullopt;
  std::vector<std::string> seen;
  std::istringstream entries(visible);
  for (std::string entry; std::getline(entries, entry, ',') && !entry.starts_with('-');)
    seen.push_back(entry);
  return seen;
}

std::vector<std::vector<int>> cores_beside_gpus(const std::vector<int>& cores, int num_workers,
                                                const std::string& root) {
  const std::vector<InstalledGpu> gpus = gpus_in_use(root);
  if (std::ssize(gpus) < num_workers) {
    refuse_binding("a GPU of /proc/driver/nvidia/gpus for each of " + std::to_string(num_workers) +
                       (num_workers == 1 ? " worker" : " workers"),
                   std::to_string(gpus.size()));
  }
  std::vector<std::vector<int>> shares;
  for (int worker = 0; worker < num_workers; ++worker) {
    const InstalledGpu& gpu = gpus[static_cast<size_t>(worker)];
    const std::string node = std::to_string(node_of(gpu, root));
    const std::vector<int> of_node =
        read_core_list(first_line_of(root + "/sys/devices/system/node/node" + node + "/cpulist"));
    std::vector<int>& share = shares.emplace_back();
    std::ranges::copy_if(cores, std::back_inserter(share), [&](int core) {
      return std::ranges::find(of_node, core) != of_node.end();
    });
    if (share.empty()) {
      refuse_binding("a core that this process may use on NUMA node " + node + ", where the GPU " +
                         gpu.address + " is",
                     "none");
    }
  }
  return shares;
}

}  // namespace cohort::launch
