// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/snapshot.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/support/resident.h"

namespace cohort::train {
namespace snapshot_test {

TEST(SnapshotTest, CopiesEveryFormOfTensor) {
  Snapshot snapshot;
  const at::Tensor whole = at::arange(12, at::kFloat);
  at::Tensor turned = at::arange(6, at::kDouble).view({2, 3}).t();
  turned.requires_grad_();
  const ShardedParts parts{{"a",
                            {{"part", {12}, 3, 8, whole.narrow(0, 3, 5)},
                             {"turned", {3, 2}, 0, 6, turned},
                             {"none", {0, 4}, 0, 0, at::empty({0, 4})}}},
                           {"b", {{"flag", {}, 0, 1, at::ones({}, at::kBool)}}}};
  const ShardedParts copies = snapshot.take(parts);
  whole.fill_(-1);
  const auto& a = copies.at("a");
  EXPECT_TRUE(a[0].tensor.equal(at::arange(3, 8, at::kFloat)));
  EXPECT_EQ(a[0].begin, 3);
  EXPECT_EQ(a[0].name, "part");
  EXPECT_TRUE(a[1].tensor.equal(turned));
  EXPECT_TRUE(a[1].tensor.is_contiguous());
  EXPECT_FALSE(a[1].tensor.requires_grad());
  EXPECT_EQ(a[2].tensor.sizes(), at::IntArrayRef({0, 4}));
  EXPECT_TRUE(copies.at("b")[0].tensor.item<bool>());
}

TEST(SnapshotTest, FreedPagesAreNotResidentAndServeTheNextCopy) {
  constexpr int64_t kMiB = 1 << 20;
  const auto of_bytes = [](int64_t bytes, int value) {
    return ShardedParts{{"a", {{"w", {bytes}, 0, bytes, at::full(bytes, value, at::kByte)}}}};
  };
  const ShardedParts large = of_bytes(64 * kMiB, 1);
  Snapshot snapshot;
  snapshot.free_pages();
  const int64_t before = test::resident_bytes();
  const void* first = snapshot.take(large).at("a")[0].tensor.data_ptr();
  EXPECT_GT(test::resident_bytes(), before + 48 * kMiB);
  snapshot.free_pages();
  EXPECT_LT(test::resident_bytes(), before + 16 * kMiB);
  EXPECT_EQ(snapshot.take(of_bytes(0, 1)).at("a")[0].tensor.numel(), 0);
  for (const int64_t mib : {64, 1, 64}) {
    const at::Tensor copy = snapshot.take(of_bytes(mib * kMiB, 3)).at("a")[0].tensor;
    EXPECT_EQ(copy.data_ptr(), first);
    EXPECT_EQ(copy.sum().item<int64_t>(), 3 * mib * kMiB);
    snapshot.free_pages();
  }
  EXPECT_EQ(snapshot.take(of_bytes(70 * kMiB, 1)).at("a")[0].tensor.sum().item<int64_t>(),
            70 * kMiB);
}

}  // namespace snapshot_test
}  // namespace cohort::train
