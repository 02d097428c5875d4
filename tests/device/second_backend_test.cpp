// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_backend.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/small_net.h"

namespace cohort::test {
namespace second_backend_test {

using comm::ProcessGroup;

TEST(SecondBackendTest, DataParallelTrainingHasTheBitsOfTheCpu) {
  using torch::optim::AdamW, torch::optim::AdamWOptions;
  device_ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(group.device(), second_device());
    const at::Tensor sum = at::full({3}, group.rank() + 1, group.device());
    group.all_reduce(sum);
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, 3)));
    const auto expected = train_small_net<AdamW>(on_cpu(group), AdamWOptions(0.01), 2);
    expect_same_bits(train_small_net<AdamW>(group, AdamWOptions(0.01), 2), expected);
  });
}

}  // namespace second_backend_test
}  // namespace cohort::test
