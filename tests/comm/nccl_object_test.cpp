// SPDX-License-Identifier: Apache-2.0
// The built libcohort_nccl.so in a program that has not loaded libtorch's CUDA half.
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/comm/backend.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace nccl_object_test {

TEST(NcclObjectTest, IsRefusedWhereLibtorchsCudaHalfIsNotLoaded) {
  const std::string message = test::message_of<ConfigError>([] { find_backend("nccl"); });
  EXPECT_TRUE(message.starts_with("backend in ")) << message;
  EXPECT_NE(message.find("libcohort_nccl.so cannot be loaded: it needs libtorch's CUDA half, which "
                         "only a process with a CUDA device has (--device cuda, or "
                         "init_accelerator(\"cuda\") in a program): "),
            std::string::npos)
      << message;
}

}  // namespace nccl_object_test
}  // namespace cohort::comm
