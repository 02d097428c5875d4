// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backend.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <link.h>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/backends/gloo/gloo.h"

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
  static Registry instance{.mutex = {},
                           .plugins = {{"gloo", {c10::DeviceType::CPU, make_gloo_backend}}}};
  return instance;
}

bool is_name(const std::string& name) {
  return !name.empty() &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
}

// The folders to search, in order; the dynamic loader's own come after them.
std::vector<fs::path> search_folders() {
  std::vector<fs::path> folders;
  const std::string path = env_string("COHORT_BACKEND_PATH").value_or("");
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) folders.emplace_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    folders.push_back(program.parent_path());
    folders.push_back((program.parent_path() / "../lib").lexically_normal());
  }
  // Every program loads this library; the backends installed with it lie beside it or below.
  Dl_info base{};
  if (dladdr(reinterpret_cast<const void*>(&env_string), &base) != 0) {
    const fs::path library = fs::canonical(base.dli_fname, error);
    if (!error) {
      folders.push_back(library.parent_path());
      folders.push_back(library.parent_path() / "cohort/lib");
    }
  }
  return folders;
}

std::string loader_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

[[noreturn]] void cannot_load(const std::string& file, const std::string& why) {
  throw ConfigError("backend in " + file + " cannot be loaded: " + why);
}

// Refuses what is no shared object, or not all of one. The loader maps a file that was cut short (a
// full disk, a copy under way), and the process dies by SIGBUS when the loader reads what is
// missing.
void check_object(const std::string& file) {
  std::error_code error;
  const uint64_t size = fs::file_size(file, error);
  if (error) cannot_load(file, error.message());
  std::ifstream in(file, std::ios::binary);
  if (!in) return;  // The loader says why.
  const auto read = [&in](auto& result) {
    in.read(reinterpret_cast<char*>(&result), sizeof(result));
    return in.good();
  };
  ElfW(Ehdr) header{};
  if (!read(header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_type != ET_DYN || header.e_phentsize != sizeof(ElfW(Phdr)))
    cannot_load(file, "expected an ELF shared object");
  in.seekg(static_cast<std::streamoff>(header.e_phoff));
  for (int i = 0; i < header.e_phnum; ++i) {
    ElfW(Phdr) segment{};
    if (!read(segment) || segment.p_offset > size || segment.p_filesz > size - segment.p_offset) {
      cannot_load(
          file, "it is cut short: its segments end behind its " + std::to_string(size) + " bytes");
    }
  }
}

// Returns the handle of `file`, or nothing if the dynamic loader finds no such file.
void* open_object(const std::string& file) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const std::string error = loader_error();
  // A missing dependency of the file gives the same words after the dependency's name.
  if (error.starts_with(file + ": cannot open shared object file: No such file")) return nullptr;
  cannot_load(file, error);
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
  return {abi->device, abi->make};
}

std::optional<BackendPlugin> load_plugin(const std::string& name,
                                         const std::vector<fs::path>& folders) {
  const std::string file = "libcohort_" + name + ".so";
  for (const fs::path& folder : folders) {
    // A path with a slash, or the loader would search its own folders.
    const std::string path = (folder.is_absolute() ? folder / file : "." / folder / file).string();
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    check_object(path);
    void* handle = open_object(path);
    if (handle == nullptr)
      throw ConfigError("backend file " + path + " vanished while it was loaded");
    return read_plugin(handle, path);
  }
  void* handle = open_object(file);
  if (handle == nullptr) return std::nullopt;
  return read_plugin(handle, file);
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
  const auto folders = search_folders();
  auto plugin = load_plugin(name, folders);
  if (!plugin) {
    throw ConfigError("backend \"" + name + "\" is unknown: there is " +
                      known_names(all.plugins, folders) + "; libcohort_" + name + ".so is not in " +
                      searched(folders));
  }
  return all.plugins.emplace(name, std::move(*plugin)).first->second;
}

}  // namespace cohort::comm
