// SPDX-License-Identifier: Apache-2.0
// Runs of ranks on the second device, compared bit by bit with the same runs on the CPU.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <cstdlib>
#include <functional>
#include <gtest/gtest.h>
#include <numeric>
#include <vector>

#include "cohort/comm/process_group.h"

#include "tests/device/second_backend.h"
#include "tests/device/second_device.h"
#include "tests/support/ranks.h"

namespace cohort::test {

using Results = std::vector<at::Tensor>;

/// Runs `body` on ranks whose group computes on the second device, and expects each to end well.
inline void device_ranks(int count, const std::function<void(const comm::ProcessGroup&)>& body) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) register_second_backend();
  for (const auto& end : run_ranks(count, body, {.backend = "second"}))
    EXPECT_EQ(end.exit_code, 0) << end.output;
}

/// The same ranks on the CPU. Collective.
inline comm::ProcessGroup on_cpu(const comm::ProcessGroup& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.subgroup(ranks, "cpu", {.backend = "gloo"});
}

inline void expect_same_bits(const Results& got, const Results& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(at::equal(got[i].cpu(), expected[i].cpu()))
        << i << ": " << (got[i].cpu() - expected[i].cpu()).abs().max().item<double>();
}

}  // namespace cohort::test
