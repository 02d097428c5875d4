// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/tensor_part.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <map>

namespace cohort {
namespace tensor_part_test {

TEST(TensorPartTest, CutsTogetherAreEverythingOnce) {
  for (const int64_t size : {1, 5, 8, 101}) {
    for (int64_t count = 1; count <= 5; ++count) {
      int64_t next = 0;
      for (int64_t i = 0; i < count; ++i) {
        const ElementRange cut = cut_of(size, i, count);
        EXPECT_EQ(cut.begin, next);
        EXPECT_LE(cut.end - cut.begin, (size + count - 1) / count);
        next = cut.end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(TensorPartTest, RunsAreRowsOfACutLastDimension) {
  const TensorPart part{.shape = {3, 8}, .dim = 1, .pieces = {{2, 4}}};
  EXPECT_FALSE(part.is_whole());
  EXPECT_EQ(part.part_shape(), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(part.runs({0, 6}), (std::vector<PartRun>{{0, {2, 4}}, {2, {10, 12}}, {4, {18, 20}}}));
  EXPECT_EQ(part.runs({1, 5}), (std::vector<PartRun>{{1, {3, 4}}, {2, {10, 12}}, {4, {18, 19}}}));
  EXPECT_TRUE(part.runs({3, 3}).empty());
}

TEST(TensorPartTest, RunsAreAsLongAsCanBe) {
  const TensorPart rows{.shape = {6, 2, 2}, .dim = 0, .pieces = {{0, 1}, {2, 3}, {3, 5}}};
  EXPECT_EQ(rows.runs({0, 16}), (std::vector<PartRun>{{0, {0, 4}}, {4, {8, 20}}}));
  const TensorPart all{.shape = {3, 4}, .dim = 1, .pieces = {{0, 4}}};
  EXPECT_TRUE(all.is_whole());
  EXPECT_EQ(all.runs({2, 11}), (std::vector<PartRun>{{2, {2, 11}}}));
}

// Every part's runs, all elements: each element of the whole once, each of the part in its place.
TEST(TensorPartTest, PartsOfEveryDimensionAreTheWhole) {
  for (const int64_t dim : {0, 1, 2}) {
    std::map<int64_t, int> seen;
    for (int64_t index = 0; index < 3; ++index) {
      TensorPart part{.shape = {4, 5, 7}, .dim = dim};
      part.pieces = {cut_of(part.shape[static_cast<size_t>(dim)], index, 3)};
      int64_t next = 0;
      const auto shape = part.part_shape();
      for (const PartRun& run : part.runs({0, shape[0] * shape[1] * shape[2]})) {
        EXPECT_EQ(run.part_begin, next);
        for (int64_t i = run.whole.begin; i < run.whole.end; ++i, ++next) ++seen[i];
      }
      EXPECT_EQ(next, shape[0] * shape[1] * shape[2]);
    }
    EXPECT_EQ(seen.size(), 4U * 5 * 7);
    for (const auto& [element, times] : seen) EXPECT_EQ(times, 1) << element;
  }
}

TEST(TensorPartTest, ElementsOutsideOfThePartAreRefused) {
  const TensorPart part{.shape = {3, 8}, .dim = 1, .pieces = {{2, 4}}};
  EXPECT_THROW(part.runs({0, 7}), c10::ValueError);
  EXPECT_THROW(part.runs({-1, 2}), c10::ValueError);
}

}  // namespace tensor_part_test
}  // namespace cohort
