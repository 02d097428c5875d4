// SPDX-License-Identifier: Apache-2.0
// Stands for the NVIDIA driver's libnvidia-ml.so.1: two GPUs, the second of which gives no figures.
#include <cstdlib>
#include <cstring>

namespace {
int devices[2];
constexpr int kNotSupported = 3;
}  // namespace

extern "C" {

int nvmlInit_v2() {
  return std::getenv("FAKE_NVML_NO_DRIVER") != nullptr ? 9 : 0;
}
int nvmlShutdown() {
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) {
  *device = &devices[i];
  return 0;
}
int nvmlDeviceGetName(void* device, char* name, unsigned size) {
  std::strncpy(name, device == &devices[0] ? "NVIDIA Fake 80GB" : "NVIDIA Mute", size);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* device, unsigned* gpu_and_memory) {
  if (device != &devices[0]) return kNotSupported;
  const char* busy = std::getenv("FAKE_NVML_BUSY");
  gpu_and_memory[0] = busy != nullptr ? static_cast<unsigned>(std::atoi(busy)) : 87;
  gpu_and_memory[1] = 40;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* total_free_used) {
  if (device != &devices[0]) return kNotSupported;
  total_free_used[0] = 80ULL << 30;
  total_free_used[1] = 68ULL << 30;
  total_free_used[2] = 12ULL << 30;
  return 0;
}

}  // extern "C"
