// SPDX-License-Identifier: Apache-2.0
// What is missing on a machine that cannot compute on CUDA, with the driver of fake_cuda_driver.cpp.
#include "cohort/comm/accelerator.h"

#include <cstdlib>
#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace accelerator_test {

std::string refusal_of(const std::string& device) {
  return test::message_of<ConfigError>([&] { init_accelerator(device, {}); });
}

TEST(AcceleratorTest, TheCpuNeedsNothing) {
  EXPECT_EQ(init_accelerator("cpu", {}), at::Device(at::kCPU));
}

TEST(AcceleratorTest, AnUnknownDeviceIsNamed) {
  for (const std::string name :
       {"", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1x", "cpu:0", "cuda:99999999999"})
    EXPECT_EQ(refusal_of(name), "device \"" + name + "\": expected cpu, cuda or cuda:N");
}

TEST(AcceleratorTest, ADriverThatTellsNoVersionIsRefused) {
  unsetenv("FAKE_CUDA_VERSION");
  EXPECT_EQ(refusal_of("cuda"),
            "CUDA cannot be used: the NVIDIA driver, libcuda.so.1, does not tell its version");
}

// That of scripts/setup has none. Twice: the first refusal is not remembered.
TEST(AcceleratorTest, ALibtorchWithoutItsCudaHalfIsNamed) {
  setenv("FAKE_CUDA_VERSION", "13000", 1);
  for (const char* device : {"cuda", "cuda:1"}) {
    const std::string refusal = refusal_of(device);
    EXPECT_TRUE(refusal.starts_with("CUDA cannot be used: this libtorch has no CUDA half, /"))
        << refusal;
    EXPECT_TRUE(
        refusal.ends_with("/libtorch_cuda.so: expected COHORT_LIBTORCH to name one that "
                          "has, such as the torch of a Python"))
        << refusal;
  }
}

TEST(AcceleratorTest, ACardIsKnownByTheDriversUuid) {
  EXPECT_EQ(card_uuid(0), "e9eaebecedeeeff0f1f2f3f4f5f6f7f8");
  EXPECT_EQ(card_uuid(1), "f9fafbfcfdfeff000102030405060708");
  EXPECT_EQ(card_uuid(2), "") << "there is none";
}

}  // namespace accelerator_test
}  // namespace cohort::comm
