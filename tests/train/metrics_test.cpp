// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/metrics.h"

#include <cmath>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "tests/support/ranks.h"

namespace cohort::train {
namespace metrics_test {

using comm::ProcessGroup;

// Example i belongs to rank i % 7 % W: uneven shares.
std::vector<int64_t> share(int64_t num_examples, const ProcessGroup& group) {
  std::vector<int64_t> mine;
  for (int64_t i = 0; i < num_examples; ++i) {
    if (i % 7 % group.size() == group.rank()) mine.push_back(i);
  }
  return mine;
}

void expect_ranks_equal_one_process(const ProcessGroup& group) {
  torch::manual_seed(3);
  const at::Tensor values = torch::randn({101}, at::kDouble) + 5;
  const at::Tensor scores = torch::randn({101, 12}, at::kDouble);
  const at::Tensor labels = torch::randint(12, {101}, at::kLong);
  const at::Tensor mine = torch::tensor(share(101, group));

  // Sums of 101 float64 terms of size 5: 101 eps relative, 2.2e-14.
  MeanMetric metric;
  metric.add(values.index_select(0, mine));
  EXPECT_NEAR(metric.mean(group), values.mean().item<double>(), 1e-12);

  MeanMetric by_means;
  by_means.add(values.index_select(0, mine).mean().item<double>(), mine.numel());
  EXPECT_NEAR(by_means.mean(group), values.mean().item<double>(), 1e-12);

  const auto counts = reduce_sums(
      group, std::array{static_cast<double>(count_top_k(scores.index_select(0, mine),
                                                        labels.index_select(0, mine), 5)),
                        static_cast<double>(mine.numel())});
  EXPECT_EQ(counts[0], static_cast<double>(count_top_k(scores, labels, 5)));
  EXPECT_EQ(counts[1], 101);
  // The mean of the ranks' means is something else: the shares are uneven.
  const auto means = reduce_sums(group, std::array{metric.local_mean()});
  EXPECT_GT(std::abs(means[0] / group.size() - values.mean().item<double>()), 1e-6);
}

TEST(MetricsTest, TwoRanksWithUnevenSharesEqualOneProcess) {
  test::ranks(2, expect_ranks_equal_one_process);
}

TEST(MetricsTest, ThreeRanksWithUnevenSharesEqualOneProcess) {
  test::ranks(3, expect_ranks_equal_one_process);
}

TEST(MetricsTest, RankWithoutExamplesChangesNothing) {
  test::ranks(2, [](const ProcessGroup& group) {
    MeanMetric metric;
    if (group.rank() == 0) metric.add(2.5, 4);
    if (group.rank() == 1) metric.add(NAN, 0);
    EXPECT_EQ(metric.mean(group), 2.5);
    EXPECT_TRUE(std::isnan(MeanMetric().mean(group)));
  });
}

TEST(MetricsTest, TopKCountsTiesByClassAndNoNan) {
  const at::Tensor scores =
      torch::tensor({{1.0, 3.0, 2.0}, {2.0, 2.0, 2.0}, {double{NAN}, 1.0, 0.0}});
  const auto count = [&](std::vector<int64_t> labels, int64_t k) {
    return count_top_k(scores, torch::tensor(labels), k);
  };
  EXPECT_EQ(count({1, 0, 1}, 1), 3);
  EXPECT_EQ(count({2, 1, 2}, 1), 0);
  EXPECT_EQ(count({2, 1, 2}, 2), 3);
  EXPECT_EQ(count({0, 2, 0}, 3), 2) << "a label with NaN as score is not right";
  EXPECT_EQ(count({0, 2, 1}, 9), 3) << "k above the number of classes counts as all";
  EXPECT_THROW(count({0, 1}, 1), c10::ValueError);
  EXPECT_THROW(count({0, 1, 2}, 0), c10::ValueError);
}

}  // namespace metrics_test
}  // namespace cohort::train
