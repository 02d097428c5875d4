// SPDX-License-Identifier: Apache-2.0
// Blocks as libtorch's operations, on the CPU: the same code as on a GPU.
#include "cohort/ps/module/device_block.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::ps {
namespace device_block_test {

std::vector<float> gradient_of(int step, size_t elements) {
  std::vector<float> gradient(elements);
  for (size_t i = 0; i < elements; ++i)
    gradient[i] = std::sin(static_cast<float>(i + 1) * static_cast<float>(step + 2));
  return gradient;
}

class DeviceBlockTest : public testing::TestWithParam<Rule> {};

TEST_P(DeviceBlockTest, FollowsTheHostsRules) {
  constexpr size_t kElements = 37;
  for (const float clip : {0.0f, 0.5f}) {
    const RuleOptions rule{.rule = GetParam(),
                           .learning_rate = 0.1f,
                           .initial_accumulator = 0.1f,
                           .l1 = 0.05f,
                           .l2 = 0.01f,
                           .clip_value = clip,
                           .clip_norm = 4 * clip,
                           .schedule = {.kind = Schedule::Kind::kWarmup, .warmup = 5}};
    const auto host = make_host_block(rule, kElements);
    const auto device = device_blocks(c10::kCPU)(rule, kElements);
    const std::vector<float> first = gradient_of(100, kElements);
    host->set_weights(first);
    device->set_weights(first);
    for (int step = 1; step <= 20; ++step) {
      const auto gradient = gradient_of(step, kElements);
      host->update(step, gradient);
      device->update(step, gradient);
    }
    ASSERT_EQ(device->state().size(), host->state().size());
    double moved = 0;
    for (size_t i = 0; i < kElements; ++i) {
      // 20 updates, a few roundings of 6e-8 each of numbers about 1.
      EXPECT_NEAR(device->weights()[i], host->weights()[i], 2e-5) << i;
      moved += std::abs(host->weights()[i] - first[i]);
    }
    for (size_t i = 0; i < host->state().size(); ++i)
      EXPECT_NEAR(device->state()[i], host->state()[i], 1e-4) << i;
    EXPECT_GT(moved, 0.1);
    // A saved state can be resumed from.
    const auto other = device_blocks(c10::kCPU)(rule, kElements);
    other->set_weights(device->weights());
    other->set_state(device->state());
    other->update(21, gradient_of(21, kElements));
    device->update(21, gradient_of(21, kElements));
    for (size_t i = 0; i < kElements; ++i)
      EXPECT_EQ(other->weights()[i], device->weights()[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, DeviceBlockTest,
                         testing::Values(Rule::kAdd, Rule::kSgd, Rule::kMomentum, Rule::kAdagrad,
                                         Rule::kAdam, Rule::kFtrl),
                         [](const auto& tested) { return to_string(tested.param); });

TEST(DeviceBlockRefusalTest, RowsRulesAreRefused) {
  EXPECT_THROW(device_blocks(c10::kCPU)({.rule = Rule::kRowwiseAdagrad}, 4), c10::ValueError);
}

}  // namespace device_block_test
}  // namespace cohort::ps
