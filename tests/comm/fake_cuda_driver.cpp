// SPDX-License-Identifier: Apache-2.0
// Stands for the NVIDIA driver's libcuda.so.1, which says of itself what FAKE_CUDA_VERSION says, and has two devices for whom asks it
// directly: libtorch's CUDA half finds none.
#include <cstdlib>

extern "C" int cuDriverGetVersion(int* version) {
  const char* text = std::getenv("FAKE_CUDA_VERSION");
  if (text == nullptr) return 3;  // CUDA_ERROR_NOT_INITIALIZED
  *version = std::atoi(text);
  return 0;
}

extern "C" int cuDeviceGet(int* device, int ordinal) {
  if (ordinal >= 2) return 101;  // CUDA_ERROR_INVALID_DEVICE
  *device = ordinal;
  return 0;
}

extern "C" int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(0xe9 + 16 * device + i);
  return 0;
}
