#include "cohort/train/snapshot.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace cohort::train {
namespace snapshot_test {

TEST(SnapshotTest, CopiesEveryFormOfTensor) {
  Snapshot snapshot;
  const at::Tensor whole = at::arange(12, at::kFloat);
  at::Tensor turned = at::arange(6, at::kDouble).view({2, 3}).t();
  turned.requires_grad_();
  const SlicedParts parts{{"a",
                           {{"part", {12}, 3, 8, whole.narrow(0, 3, 5)},
                            {"turned", {3, 2}, 0, 6, turned},
                            {"none", {0, 4}, 0, 0, at::empty({0, 4})}}},
                          {"b", {{"flag", {}, 0, 1, at::ones({}, at::kBool)}}}};
  const SlicedParts copies = snapshot.take(parts);
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

TEST(SnapshotTest, MemoryIsKeptFromCopyToCopy) {
  constexpr int64_t kMiB = 1 << 20;
  const auto of_bytes = [](int64_t bytes) {
    return SlicedParts{{"a", {{"w", {bytes}, 0, bytes, at::ones(bytes, at::kByte)}}}};
  };
  Snapshot snapshot;
  EXPECT_EQ(snapshot.kept_bytes(), 0U);
  const void* first = snapshot.take(of_bytes(5 * kMiB)).at("a")[0].tensor.data_ptr();
  EXPECT_EQ(snapshot.kept_bytes(), 5U * kMiB);
  EXPECT_EQ(snapshot.take(of_bytes(0)).at("a")[0].tensor.numel(), 0);
  for (const int64_t bytes : {5 * kMiB, kMiB, 5 * kMiB})
    EXPECT_EQ(snapshot.take(of_bytes(bytes)).at("a")[0].tensor.data_ptr(), first);
  EXPECT_EQ(snapshot.kept_bytes(), 5U * kMiB);
  EXPECT_EQ(snapshot.take(of_bytes(7 * kMiB)).at("a")[0].tensor.sum().item<int64_t>(), 7 * kMiB);
  EXPECT_EQ(snapshot.kept_bytes(), 7U * kMiB);
}

}  // namespace snapshot_test
}  // namespace cohort::train
