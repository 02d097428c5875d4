// SPDX-License-Identifier: Apache-2.0
// The built libcohort_cuda.so on a machine that has no driver, or hides its cards.
#include <cstdlib>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/comm/accelerator.h"
#include "cohort/nmt/fused.h"
#include "cohort/nmt/kernels/cuda/launches.h"
#include "cohort/nmt/kernels/kernels.h"

#include "tests/support/message_of.h"

namespace cohort::nmt {
namespace cuda_object_test {

TEST(CudaObjectTest, LoadsWithoutADriverAndRefusesToLaunch) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const std::string file = comm::cuda_kernels_file();
  void* object = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);  // As init_cuda() does.
  ASSERT_NE(object, nullptr) << file << ": " << dlerror();
  const CudaLaunches* const launches = cuda_launches_for(c10::DeviceType::CUDA);
  ASSERT_NE(launches, nullptr) << file;

  use_cuda_launches(launches, at::kCPU);
  const std::string expected =
      "a kernel of libcohort_cuda.so was not launched, or one before it has failed: ";
  DropoutStream stream;
  const std::string dropped =
      test::message_of<c10::Error>([&] { dropout(at::ones({4}), 0.5, stream); });
  EXPECT_TRUE(dropped.starts_with(expected + "CUDA driver version is insufficient") ||
              dropped.starts_with(expected + "no CUDA-capable device is detected"))
      << dropped;
  const at::Tensor hidden = at::ones({2, 3}), labels = at::zeros({2}, at::kLong);
  const std::string loss = test::message_of<c10::Error>([&] {
    smoothed_cross_entropy(hidden, at::ones({5, 3}), labels, 0.1);
  });
  EXPECT_TRUE(loss.starts_with(expected)) << loss;
  use_cuda_launches(nullptr, at::kCPU);
}

}  // namespace cuda_object_test
}  // namespace cohort::nmt
