// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/export_rows.h"

#include <bit>
#include <cstring>
#include <gtest/gtest.h>

#include "cohort/base/safetensors.h"

#include "tests/base/temporary_folder.h"
#include "tests/ps/table_support.h"

namespace cohort::ps {
namespace export_rows_test {

constexpr int64_t kWidth = 3;

template <class Value>
std::vector<Value> values_of(const TensorView& tensor) {
  std::vector<Value> values(tensor.bytes.size() / sizeof(Value));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

// Also with rows on disk, and ids in both halves of the numbers.
TEST(ExportRowsTest, AFileHasEveryRowOrThoseSinceSortedById) {
  const TemporaryFolder folder;
  TableOptions options{.name = "clicks", .width = kWidth, .at_cap = AtCap::kSpill};
  options.memory_cap_bytes = 200 * row_bytes(options);
  RowTable table(options,
                 std::make_unique<SpillStore>(
                     folder / "cold", SpillStore::Options{.width = kWidth, .state_width = 1}));
  auto pushes = some_pushes(60, 10'000, kWidth);
  for (Push& push : pushes) {
    for (uint64_t& id : push.ids) id *= 0x9e3779b97f4a7c15;
    apply(table, push);
  }
  const auto all = rows_of(table);
  ASSERT_GT(table.statistics().spilled_rows, 1000);
  for (const uint32_t since : {0U, pushes[40].now}) {
    const std::string path = folder / "rows.safetensors";
    const ExportedRows exported = export_rows(table, path, since);
    const SafetensorsFile file(path);
    const auto ids = values_of<uint64_t>(file.at("ids"));
    const auto weights = values_of<float>(file.at("weights"));
    EXPECT_EQ(file.at("weights").shape,
              (std::vector<int64_t>{static_cast<int64_t>(ids.size()), kWidth}));
    EXPECT_EQ(file.metadata().at("pushed_since"), std::to_string(since));
    EXPECT_EQ(exported.rows, static_cast<int64_t>(ids.size()));
    size_t i = 0;
    for (const auto& [id, row] : all) {  // In the order of unsigned ids.
      if (row.last_push < since) continue;
      ASSERT_LT(i, ids.size());
      ASSERT_EQ(ids[i], id);
      ASSERT_TRUE(std::equal(row.weights.begin(), row.weights.end(), weights.begin() + 3 * i))
          << id;
      ++i;
    }
    EXPECT_EQ(i, ids.size());
    EXPECT_EQ(since == 0, ids.size() == all.size());
  }
}

TEST(ExportRowsTest, AnEmptyTableGivesAFileWithoutRows) {
  const TemporaryFolder folder;
  RowTable table({.name = "clicks", .width = kWidth});
  EXPECT_EQ(export_rows(table, folder / "rows").rows, 0);
  EXPECT_EQ(SafetensorsFile(folder / "rows").at("weights").shape,
            (std::vector<int64_t>{0, kWidth}));
}

}  // namespace export_rows_test
}  // namespace cohort::ps
