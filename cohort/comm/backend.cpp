// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backend.h"

#include <algorithm>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/backends/gloo/host_staging.h"
#include "cohort/comm/backends/hierarchical/hierarchical_backend.h"
#include "cohort/comm/backends/shm/shm_backend.h"
#include "cohort/comm/plugin_file.h"

namespace cohort::comm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEntry = "cohort_backend";

// Backends are the process's, like the shared objects that hold them: the one registry that is no
// object's member.
struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendPlugin>
      plugins;  // nodes never move: find_backend hands out references
};

Registry& registry() {
  static Registry instance{
      .mutex = {},
      .plugins = {{"gloo", {c10::DeviceType::CPU, make_gloo_backend}},
                  {"gloo_cuda", gloo_through_host(c10::DeviceType::CUDA)},
                  {"hierarchical", {c10::DeviceType::CPU, make_hierarchical_backend}},
                  {"shm", {c10::DeviceType::CPU, make_shm_backend}}}};
  return instance;
}

bool is_name(const std::string& name) {
  return !name.empty() &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
}

BackendPlugin read_plugin(void* handle, const std::string& file) {
  void* entry = dlsym(handle, kEntry);
  if (entry == nullptr) {
    throw ConfigError(file + " is no backend of Cohort: expected it to export " + kEntry + "()");
  }
  const auto* abi = reinterpret_cast<const BackendAbi* (*)()>(entry)();
  if (abi == nullptr)
    throw ConfigError(file + " is no backend of Cohort: its " + kEntry + "() returned nothing");
  if (abi->abi_version != kBackendAbiVersion) {
    throw ConfigError(file + " was built for version " + std::to_string(abi->abi_version) +
                      " of Cohort's backend interface: expected version " +
                      std::to_string(kBackendAbiVersion));
  }
  const std::string libtorch = abi->libtorch_version == nullptr ? "(none)" : abi->libtorch_version;
  if (libtorch != TORCH_VERSION) {
    throw ConfigError(file + " was built for libtorch " + libtorch +
                      ": expected libtorch " TORCH_VERSION);
  }
  if (abi->make == nullptr)
    throw ConfigError(file + " is no backend of Cohort: its make function is missing");
  BackendPlugin plugin{.device = abi->device, .make = abi->make};
  if (abi->progress != nullptr) plugin.progress = abi->progress;
  return plugin;
}

std::optional<BackendPlugin> load_plugin(const std::string& name,
                                         const std::vector<fs::path>& folders) {
  const std::string file = "libcohort_" + name + ".so";
  const std::string found = find_plugin_file(file, folders);
  const std::string path = found.empty() ? file : found;
  void* handle = load_plugin_file("backend", path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return std::nullopt;
  return read_plugin(handle, path);
}

// Does the file hold the entry's name? Only for the text of an error: nothing is loaded for it.
bool mentions_entry(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  return bytes.find(kEntry) != std::string::npos;
}

// "gloo, mpi": what is registered, and what lies in `folders`.
std::string known_names(const std::map<std::string, BackendPlugin>& plugins,
                        const std::vector<fs::path>& folders) {
  std::vector<std::string> names;
  for (const auto& [name, plugin] : plugins) names.push_back(name);
  for (const fs::path& folder : folders) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      std::string name = entry.path().filename().string();
      if (!name.starts_with("libcohort_") || !name.ends_with(".so")) continue;
      name = name.substr(10, name.size() - 13);
      if (!is_name(name) || !entry.is_regular_file(error)) continue;
      if (mentions_entry(entry.path())) names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

std::string searched(const std::vector<fs::path>& folders) {
  std::string list;
  for (const fs::path& folder : folders) list += folder.string() + ", ";
  return list + "the dynamic loader's path";
}

}  // namespace

void register_backend(const std::string& name, BackendPlugin plugin) {
  TORCH_CHECK_VALUE(is_name(name), "register_backend: expected a name of [a-z0-9_]+, got \"", name,
                    "\"");
  TORCH_CHECK_VALUE(plugin.make != nullptr, "register_backend: backend \"", name,
                    "\" has no make function");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK_VALUE(all.plugins.emplace(name, std::move(plugin)).second,
                    "register_backend: there is a backend \"", name, "\" already");
}

const BackendPlugin& find_backend(const std::string& name) {
  if (!is_name(name)) {
    throw ConfigError("backend \"" + name +
                      "\" is no name of a backend: expected letters a-z, digits and _");
  }
  Registry& all = registry();
  // Held while a file is loaded, so that two threads do not load it twice; a plug-in's constructors
  // may not come back here.
  const std::lock_guard lock(all.mutex);
  const auto known = all.plugins.find(name);
  if (known != all.plugins.end()) return known->second;
  const auto folders = plugin_folders();
  auto plugin = load_plugin(name, folders);
  if (!plugin) {
    throw ConfigError("backend \"" + name + "\" is unknown: there is " +
                      known_names(all.plugins, folders) + "; libcohort_" + name + ".so is not in " +
                      searched(folders));
  }
  return all.plugins.emplace(name, std::move(*plugin)).first->second;
}

}  // namespace cohort::comm
