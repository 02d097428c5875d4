// SPDX-License-Identifier: Apache-2.0
// Stands for the NVIDIA driver's libcuda.so.1, which says of itself what FAKE_CUDA_VERSION says.
#include <cstdlib>

extern "C" int cuDriverGetVersion(int* version) {
  const char* text = std::getenv("FAKE_CUDA_VERSION");
  if (text == nullptr) return 3;  // CUDA_ERROR_NOT_INITIALIZED
  *version = std::atoi(text);
  return 0;
}
