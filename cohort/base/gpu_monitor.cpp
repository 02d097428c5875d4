// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/gpu_monitor.h"

#include <array>
#include <cmath>
#include <dlfcn.h>

namespace cohort {
namespace {
constexpr int kSuccess = 0;
}  // namespace

// The few declarations of nvml.h that are used; NVML keeps them stable within the ".1" of its name.
struct GpuMonitor::Library {
  using Device = void*;
  struct Utilization {
    unsigned gpu;
    unsigned memory;
  };
  struct Memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
  };

  void* handle = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*count)(unsigned*) = nullptr;
  int (*device)(unsigned, Device*) = nullptr;
  int (*name)(Device, char*, unsigned) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;

  template <class Function>
  bool find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(::dlsym(handle, symbol));
    return function != nullptr;
  }
  bool open() {
    handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    return handle != nullptr && find("nvmlInit_v2", init) && find("nvmlShutdown", shutdown) &&
           find("nvmlDeviceGetCount_v2", count) && find("nvmlDeviceGetHandleByIndex_v2", device) &&
           find("nvmlDeviceGetName", name) && find("nvmlDeviceGetUtilizationRates", utilization) &&
           find("nvmlDeviceGetMemoryInfo", memory) && init() == kSuccess;
  }
};

// The handle is never closed: the driver's library does not like to be unloaded and loaded again.
GpuMonitor::GpuMonitor() : library_(std::make_unique<Library>()) {
  if (!library_->open()) library_.reset();
}

GpuMonitor::~GpuMonitor() {
  if (library_) library_->shutdown();
}

std::vector<GpuUse> GpuMonitor::sample() const {
  std::vector<GpuUse> gpus;
  unsigned count = 0;
  if (!library_ || library_->count(&count) != kSuccess) return gpus;
  for (unsigned i = 0; i < count; ++i) {
    GpuUse gpu{.name = "?",
               .busy_percent = std::nan(""),
               .memory_used_bytes = std::nan(""),
               .memory_bytes = std::nan("")};
    Library::Device device = nullptr;
    if (library_->device(i, &device) == kSuccess) {
      std::array<char, 96> name{};
      if (library_->name(device, name.data(), name.size()) == kSuccess) gpu.name = name.data();
      Library::Utilization utilization{};
      if (library_->utilization(device, &utilization) == kSuccess)
        gpu.busy_percent = utilization.gpu;
      Library::Memory memory{};
      if (library_->memory(device, &memory) == kSuccess) {
        gpu.memory_used_bytes = static_cast<double>(memory.used);
        gpu.memory_bytes = static_cast<double>(memory.total);
      }
    }
    gpus.push_back(gpu);
  }
  return gpus;
}

}  // namespace cohort
