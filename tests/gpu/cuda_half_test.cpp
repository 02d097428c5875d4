// SPDX-License-Identifier: Apache-2.0
// libtorch's CUDA half (scripts/setup cuda) in a process that has a driver and no card: that of
// tests/comm/fake_cuda_driver.cpp.
#include <ATen/detail/CUDAHooksInterface.h>
#include <cstdlib>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/comm/accelerator.h"
#include "cohort/comm/backend.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace cuda_half_test {

std::string refusal_with_driver(const char* version) {
  setenv("FAKE_CUDA_VERSION", version, 1);
  return test::message_of<ConfigError>([] { init_cuda(); });
}

TEST(CudaHalfTest, LoadsAndFindsNoDevice) {
  EXPECT_EQ(refusal_with_driver("13000"), "CUDA cannot be used: the NVIDIA driver finds no device");
  EXPECT_TRUE(at::detail::getCUDAHooks().hasCUDART());
  EXPECT_THROW(at::ones({2}, at::kCUDA), c10::Error);
}

TEST(CudaHalfTest, AnOldDriverIsRefused) {
  const std::string refusal = refusal_with_driver("12040");
  EXPECT_TRUE(
      refusal.starts_with("CUDA cannot be used: the NVIDIA driver is of CUDA 12.4: expected 13."))
      << refusal;
  EXPECT_TRUE(refusal.ends_with(" or later, which libtorch is built for")) << refusal;
}

TEST(CudaHalfTest, HasWhatNcclsPlugInLeavesOpen) {
  refusal_with_driver("13000");
  const BackendPlugin& nccl = find_backend("nccl");
  EXPECT_EQ(nccl.device, c10::DeviceType::CUDA);
  BackendRequest request;
  request.store = c10::make_intrusive<c10d::HashStore>();
  request.timeout = std::chrono::milliseconds(1000);
  const std::string refusal = test::message_of<c10::ValueError>([&] { nccl.make(request); });
  EXPECT_EQ(refusal, "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
}

}  // namespace cuda_half_test
}  // namespace cohort::comm
