// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/accelerator.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <array>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <charconv>
#include <cstdint>
#include <dlfcn.h>
#include <filesystem>
#include <optional>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/plugin_file.h"

namespace cohort::comm {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw ConfigError("CUDA cannot be used: " + what);
}

// 13000: 13.0.
std::string version_text(long version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Of the driver's interface, as its libcuda.so.1 says.
int driver_version() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) refuse("no NVIDIA driver is installed (" + std::string(dlerror()) + ")");
  auto* get_version = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  int version = 0;
  if (get_version == nullptr || get_version(&version) != 0)
    refuse("the NVIDIA driver, libcuda.so.1, does not tell its version");
  return version;
}

void load_cuda_half() {
  Dl_info half{};
  dladdr(reinterpret_cast<const void*>(&at::globalContext), &half);
  const auto library = std::filesystem::path(half.dli_fname).parent_path() / "libtorch_cuda.so";
  std::error_code error;
  if (!std::filesystem::exists(library, error)) {
    refuse("this libtorch has no CUDA half, " + library.string() +
           ": expected COHORT_LIBTORCH to name one that has, such as the torch of a Python");
  }
  // Its guard, allocator and kernels register themselves.
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) refuse(dlerror());
}

int count_devices() {
  const int driver = driver_version();
  load_cuda_half();
  if (!at::detail::getCUDAHooks().hasCUDART()) {  // libtorch keeps the first answer that it gave.
    refuse(
        "this program asked libtorch for CUDA before it was loaded: expected init_cuda() before "
        "torch::manual_seed, the first backward and the like");
  }
  const long needed = at::detail::getCUDAHooks().versionCUDART();
  if (driver / 1000 < needed / 1000) {
    refuse("the NVIDIA driver is of CUDA " + version_text(driver) + ": expected " +
           version_text(needed) + " or later, which libtorch is built for");
  }
  const int count = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
  if (count == 0) {
    const auto visible = env_string("CUDA_VISIBLE_DEVICES");
    refuse("the NVIDIA driver finds no device" +
           (visible ? " among CUDA_VISIBLE_DEVICES=" + *visible : ""));
  }
  // Global: cohort::nmt finds its entry among the process's symbols.
  if (const std::string kernels = cuda_kernels_file(); !kernels.empty())
    load_plugin_file("CUDA kernels", kernels, RTLD_NOW | RTLD_GLOBAL);
  return count;
}

}  // namespace

std::string cuda_kernels_file() {
  return find_plugin_file("libcohort_cuda.so", plugin_folders());
}

int init_cuda() {
  try {
    static const int count = count_devices();  // What throws is tried again.
    return count;
  } catch (const ConfigError&) {
    throw;
  } catch (const c10::Error& error) {  // Of libtorch's CUDA half.
    refuse(one_line(error));
  }
}

std::string card_uuid(int index) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return {};
  auto* get_device = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  // Version 1 gives all parts of a card its own.
  auto* get_uuid = reinterpret_cast<int (*)(uint8_t*, int)>(dlsym(driver, "cuDeviceGetUuid_v2"));
  int device = 0;
  std::array<uint8_t, 16> uuid{};
  if (get_device == nullptr || get_uuid == nullptr || get_device(&device, index) != 0 ||
      get_uuid(uuid.data(), device) != 0)
    return {};
  std::string text;
  for (const uint8_t byte : uuid) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  return text;
}

at::Device init_accelerator(const std::string& name, const RankInfo& info) {
  const std::string kind = name.substr(0, name.find(':'));
  std::optional<int> index;
  bool good = true;
  if (kind != name) {
    const char *begin = name.data() + kind.size() + 1, *end = name.data() + name.size();
    const auto [read, error] = std::from_chars(begin, end, index.emplace());
    good = error == std::errc() && read == end && *index >= 0;
  }
  std::optional<at::DeviceType> type;
  try {
    type = at::Device(kind).type();
  } catch (const c10::Error&) {  // Its text lists devices that this process cannot have.
  }
  const bool is_cuda = type == at::kCUDA;
  const bool is_there = type && type != at::kMeta && c10::impl::hasDeviceGuardImpl(*type);
  if (!good || !(is_cuda || is_there) || (type == at::kCPU && index))
    throw ConfigError("device \"" + name + "\": expected cpu, cuda or cuda:N");
  if (type == at::kCPU) return at::kCPU;
  const int count = is_cuda ? init_cuda() : c10::impl::getDeviceGuardImpl(*type)->deviceCount();
  if (index && *index >= count) {
    throw ConfigError("device " + name + ": expected a number below " + std::to_string(count) +
                      ", this process's " + c10::DeviceTypeName(*type, /*lower_case=*/!is_cuda) +
                      " devices");
  }
  const at::Device device(
      *type, static_cast<c10::DeviceIndex>(index ? *index : device_index(info, count)));
  c10::impl::getDeviceGuardImpl(device.type())->setDevice(device);
  return device;
}

}  // namespace cohort::comm
