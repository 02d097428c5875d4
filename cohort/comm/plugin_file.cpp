// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/plugin_file.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <link.h>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::comm {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_load(const std::string& what, const std::string& path,
                              const std::string& why) {
  throw ConfigError(what + " in " + path + " cannot be loaded: " + why);
}

// Returns why `path` is no shared object, or not all of one; empty if it is one. The loader maps a
// file that was cut short (a full disk, a copy under way), and the process dies by SIGBUS when the
// loader reads what is missing.
std::string fault_of(const std::string& path) {
  std::error_code error;
  const uint64_t size = fs::file_size(path, error);
  if (error) return error.message();
  std::ifstream in(path, std::ios::binary);
  if (!in) return {};  // The loader says why.
  const auto read = [&in](auto& result) {
    in.read(reinterpret_cast<char*>(&result), sizeof(result));
    return in.good();
  };
  ElfW(Ehdr) header{};
  if (!read(header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_type != ET_DYN || header.e_phentsize != sizeof(ElfW(Phdr)))
    return "expected an ELF shared object";
  in.seekg(static_cast<std::streamoff>(header.e_phoff));
  for (int i = 0; i < header.e_phnum; ++i) {
    ElfW(Phdr) segment{};
    if (!read(segment) || segment.p_offset > size || segment.p_filesz > size - segment.p_offset)
      return "it is cut short: its segments end behind its " + std::to_string(size) + " bytes";
  }
  return {};
}

// Whether the symbol that the loader does not find is one of libtorch's CUDA half: objects for CUDA
// leave those to init_cuda(), so that they are built, and programs start, where there is none.
bool lacks_cuda_half(const std::string& error) {
  const size_t named = error.find("undefined symbol");
  if (named == std::string::npos) return false;
  const std::string symbol = error.substr(named);
  const bool of_cuda = symbol.find("cuda") != std::string::npos ||
                       symbol.find("CUDA") != std::string::npos ||
                       symbol.find("NCCL") != std::string::npos;
  return of_cuda && dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr;
}

}  // namespace

std::vector<fs::path> plugin_folders() {
  std::vector<fs::path> folders;
  const auto add = [&](fs::path folder) {
    if (std::ranges::find(folders, folder) == folders.end()) folders.push_back(std::move(folder));
  };
  const std::string path = env_string("COHORT_BACKEND_PATH").value_or("");
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) add(path.substr(begin, end - begin));
    begin = end + 1;
  }
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    add(program.parent_path());
    add((program.parent_path() / "../lib").lexically_normal());
  }
  // Every program loads this library; what is installed with it lies beside it or below.
  Dl_info base{};
  if (dladdr(reinterpret_cast<const void*>(&env_string), &base) != 0) {
    const fs::path library = fs::canonical(base.dli_fname, error);
    if (!error) {
      add(library.parent_path());
      add(library.parent_path() / "cohort/lib");
    }
  }
  return folders;
}

std::string find_plugin_file(const std::string& file, const std::vector<fs::path>& folders) {
  for (const fs::path& folder : folders) {
    const fs::path path = folder.is_absolute() ? folder / file : "." / folder / file;
    std::error_code error;
    if (fs::exists(path, error)) return path.string();
  }
  return {};
}

void* load_plugin_file(const std::string& what, const std::string& path, int flags) {
  const bool is_path = path.find('/') != std::string::npos;
  if (is_path) {
    if (const std::string fault = fault_of(path); !fault.empty()) cannot_load(what, path, fault);
  }
  void* handle = dlopen(path.c_str(), flags);
  if (handle != nullptr) return handle;
  const std::string error = dlerror();
  // A missing dependency of the file gives the same words after the dependency's name.
  if (!is_path && error.starts_with(path + ": cannot open shared object file: No such file"))
    return nullptr;
  cannot_load(what, path,
              lacks_cuda_half(error) ? "it needs libtorch's CUDA half, which only a process with a "
                                       "CUDA device has (--device cuda, or "
                                       "init_accelerator(\"cuda\") in a program): " +
                                           error
                                     : error);
}

}  // namespace cohort::comm
