// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/row_merger.h"

#include <gtest/gtest.h>
#include <map>
#include <random>
#include <vector>

namespace cohort::ps {
namespace row_merger_test {

TEST(RowMergerTest, SumsAreThoseOfOneRowAfterTheOther) {
  // In float32, where another order would give other bits: so equality is that of the order.
  std::mt19937 random(7);
  std::uniform_real_distribution<float> gradient(-1, 1);
  constexpr size_t kWidth = 3;
  RowMerger merger;
  std::map<uint64_t, std::vector<float>> expected;
  std::vector<uint64_t> order;
  merger.begin(kWidth, 4);  // Far fewer than there are: it grows.
  for (int push = 0; push < 5; ++push) {
    std::vector<uint64_t> ids(400);
    std::vector<float> gradients(ids.size() * kWidth);
    for (uint64_t& id : ids) id = random() % 300 * 0x9e3779b97f4a7c15;
    for (float& value : gradients) value = gradient(random);
    merger.add(ids, gradients);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto [row, is_new] = expected.try_emplace(ids[i], kWidth, 0.0f);
      if (is_new) order.push_back(ids[i]);
      for (size_t j = 0; j < kWidth; ++j) row->second[j] += gradients[i * kWidth + j];
    }
  }
  ASSERT_EQ(std::vector<uint64_t>(merger.ids().begin(), merger.ids().end()), order);
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = 0; j < kWidth; ++j)
      EXPECT_EQ(merger.gradients()[i * kWidth + j], expected.at(order[i])[j]);
  }
  merger.divide(3);
  EXPECT_EQ(merger.gradients()[0], expected.at(order[0])[0] / 3);
}

TEST(RowMergerTest, ItForgetsWhatWasBefore) {
  RowMerger merger;
  const std::vector<uint64_t> ids{0, UINT64_MAX, 0};
  merger.begin(1, 3);
  merger.add(ids, std::vector<float>{1, 2, 4});
  EXPECT_EQ(merger.gradients()[0], 5);
  merger.begin(2, 0);
  EXPECT_TRUE(merger.ids().empty());
  merger.add(ids, std::vector<float>{1, 2, 3, 4, 5, 6});
  EXPECT_EQ(std::vector<float>(merger.gradients().begin(), merger.gradients().end()),
            (std::vector<float>{6, 8, 3, 4}));
}

}  // namespace row_merger_test
}  // namespace cohort::ps
