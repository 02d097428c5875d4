// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/spill_store.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <numeric>

#include "cohort/base/error.h"
#include "cohort/ps/server/parameter_state.h"
#include "cohort/ps/table/table_file.h"

#include "tests/base/temporary_folder.h"
#include "tests/ps/table_support.h"
#include "tests/support/message_of.h"
#include "tests/support/resident.h"

namespace cohort::ps {
namespace spill_store_test {

using test::message_of;

constexpr int64_t kWidth = 4;

TableOptions options_of(Rule rule) {
  return {
      .name = "t", .width = kWidth, .rule = {.rule = rule}, .eviction = {.time_to_live_s = 60'000}};
}

TableOptions spilling(TableOptions options, int64_t cap_rows) {
  options.at_cap = AtCap::kSpill;
  options.memory_cap_bytes = cap_rows * row_bytes(options);
  return options;
}

std::unique_ptr<SpillStore> store_in(const std::string& folder, const TableOptions& options) {
  return std::make_unique<SpillStore>(
      folder, SpillStore::Options{.width = options.width,
                                  .state_width = state_width(options.rule.rule, options.width),
                                  .memory_bytes = 1 << 20});
}

struct StoredRow {
  uint64_t id;
  std::vector<float> weights;
  RowView view() const {
    return {.id = id, .last_push = 7, .pushes = 2, .weights = weights, .state = {}};
  }
};

TEST(SpillStoreTest, GivesBackTheRowsThatItHas) {
  const TemporaryFolder folder;
  SpillStore store(folder / "cold", {.width = 2});
  const StoredRow a{1, {1, 2}};
  const StoredRow b{~uint64_t{0}, {3, 4}};
  const StoredRow c{0x0100, {5, 6}};
  store.put(std::vector<RowView>{b.view(), a.view(), c.view()});
  EXPECT_EQ(store.rows(), 3);
  std::map<size_t, uint64_t> found;
  const auto note = [&](size_t i, const RowView& row) {
    found[i] = row.id;
    EXPECT_EQ(row.last_push, 7);
    EXPECT_EQ(row.pushes, 2);
    if (row.id == c.id) {
      EXPECT_EQ(std::vector<float>(row.weights.begin(), row.weights.end()), c.weights);
    }
  };
  store.get(std::vector<uint64_t>{0x0100, 2, ~uint64_t{0}, 0x0100, 1}, note);
  EXPECT_EQ(found,
            (std::map<size_t, uint64_t>{{0, 0x0100}, {2, ~uint64_t{0}}, {3, 0x0100}, {4, 1}}));
  store.erase(std::vector<uint64_t>{1});
  EXPECT_EQ(store.rows(), 2);
  std::vector<uint64_t> all;
  store.for_each([&](const RowView& row) { all.push_back(row.id); });
  EXPECT_EQ(all, (std::vector<uint64_t>{0x0100, ~uint64_t{0}}));
}

TEST(SpillStoreTest, ACheckpointKeepsWhatItHadWhateverIsDoneToItsCopies) {
  const TemporaryFolder folder;
  const StoredRow a{1, {1, 2}};
  const StoredRow b{2, {3, 4}};
  {
    SpillStore store(folder / "cold", {.width = 2});
    store.put(std::vector<RowView>{a.view()});
    store.checkpoint(folder / "checkpoint");
    store.put(std::vector<RowView>{b.view()});
  }
  for (const char* name : {"first", "second"}) {
    SpillStore::restore(folder / "checkpoint", folder / name);
    SpillStore copy(folder / name, {.width = 2});
    EXPECT_EQ(copy.rows(), 1) << name;
    copy.erase(std::vector<uint64_t>{1});
    copy.put(std::vector<RowView>{b.view()});
    copy.checkpoint(folder / (std::string("of ") + name));
  }
  EXPECT_EQ(message_of<ConfigError>([&] { SpillStore store(folder / "first", {.width = 3}); }),
            "spill store " + (folder / "first") +
                ": expected rows of 3 weights and 0 floats of state, found 2 and 0");
  EXPECT_EQ(message_of<ConfigError>(
                [&] { SpillStore::restore(folder / "checkpoint", folder / "first"); }),
            "spill store " + (folder / "first") + ": is there already");
}

TEST(SpillStoreTest, AFolderThatIsNoCheckpointIsNoEmptyStore) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "empty");
  EXPECT_NE(message_of<c10::Error>([&] {
              SpillStore store(folder / "empty", {.width = 2});
            }).find("spill store " + (folder / "empty") + ": opening: "),
            std::string::npos);
  { const SpillStore store(folder / "killed", {.width = 2}); }
  EXPECT_EQ(message_of<ConfigError>([&] { SpillStore store(folder / "killed", {.width = 2}); }),
            "spill store " + (folder / "killed") +
                ": expected a checkpoint, it does not say how many rows it has");
}

TEST(SpillStoreTest, ADamagedBlockIsRefused) {
  const TemporaryFolder folder;
  std::vector<StoredRow> rows;
  std::vector<RowView> views;
  for (uint64_t id = 0; id < 1000; ++id) rows.push_back({id, {1, 2}});
  for (const StoredRow& row : rows) views.push_back(row.view());
  {
    SpillStore store(folder / "cold", {.width = 2});
    store.put(views);
    store.checkpoint(folder / "checkpoint");
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder / "checkpoint")) {
    if (entry.path().extension() != ".sst") continue;
    std::string content = read_file(entry.path());
    content[100] = static_cast<char>(content[100] ^ 1);
    write_file(entry.path(), content);
  }
  SpillStore store(folder / "checkpoint", {.width = 2});
  const std::string message = message_of<c10::Error>([&] { store.for_each([](const auto&) {}); });
  EXPECT_EQ(message.rfind("spill store " + (folder / "checkpoint") + ": reading: Corruption", 0), 0)
      << message;
}

// A cap of a quarter of the rows, and of less than one push.
TEST(SpillStoreTest, ATableOfFourTimesItsCapEqualsOneWithout) {
  for (const Rule rule : {Rule::kSgd, Rule::kRowwiseAdagrad, Rule::kAdam}) {
    for (const int64_t cap_rows : {350, 64}) {
      if (cap_rows == 64 && rule != Rule::kAdam) continue;
      const TemporaryFolder folder;
      const TableOptions options = options_of(rule);
      const TableOptions capped = spilling(options, cap_rows);
      RowTable unlimited(options);
      RowTable table(capped, store_in(folder / "cold", capped));
      std::vector<float> pulled(50 * kWidth);
      std::vector<float> expected(50 * kWidth);
      for (const Push& push : some_pushes(200, 3000, kWidth)) {
        apply(unlimited, push);
        apply(table, push);
        if (push.step % 20 == 0) {
          unlimited.evict(push.now);
          table.evict(push.now);
        }
        ASSERT_LE(table.statistics().rows, cap_rows);
        unlimited.pull(push.ids, expected, RowTable::Unknown::kInitial);
        table.pull(push.ids, pulled, RowTable::Unknown::kInitial);
        ASSERT_EQ(pulled, expected);
      }
      const auto statistics = table.statistics();
      EXPECT_GT(statistics.rows + statistics.spilled_rows, 4 * cap_rows);
      EXPECT_GT(statistics.promoted, 500);
      EXPECT_GT(statistics.evicted, 300);
      EXPECT_EQ(statistics.rows + statistics.spilled_rows, unlimited.statistics().rows);
      EXPECT_EQ(statistics.evicted, unlimited.statistics().evicted);
      EXPECT_EQ(rows_of(table), rows_of(unlimited)) << to_string(rule);
    }
  }
}

TEST(SpillStoreTest, TheExampleOfTheGuideWorks) {
  // As docs/ps.md shows it.
  const TableOptions clicks{
      .name = "clicks",
      .width = 16,
      .rule = {.rule = Rule::kRowwiseAdagrad, .learning_rate = 0.05f},
      .entry = {.kind = EntryPolicy::Kind::kCount, .pushes = 3},
      .eviction = {.time_to_live_s = 30 * 86'400, .minimum_score = 0.5},
      .memory_cap_bytes = int64_t{4} << 30,
      .at_cap = AtCap::kSpill,
  };
  validate(clicks);
  EXPECT_EQ(to_text(table_options_of(to_text(clicks))), to_text(clicks));
  const TemporaryFolder folder;
  RowTable table(clicks, store_in(folder / "cold", clicks));
  const std::vector<float> gradient(16, 1.0f);
  const std::vector<uint64_t> id{7};
  for (int64_t push = 1; push <= 3; ++push) {
    EXPECT_EQ(table.statistics().rows, 0) << "before push " << push;
    table.push(id, gradient, push, 1);
  }
  EXPECT_EQ(table.statistics().rows, 1);
  table.evict(1 + 30 * 86'400);
  EXPECT_EQ(table.statistics().rows, 0);
}

TEST(SpillStoreTest, AServersTableThatSpillsStaysNearItsCap) {
  JobOptions job;
  job.tables = {{.name = "t", .width = 16, .memory_cap_bytes = 4 << 20, .at_cap = AtCap::kSpill}};
  const TemporaryFolder folder;
  ParameterState state(0, folder / "cold");
  const std::string text = job.to_json();
  const int64_t before = test::resident_bytes();
  state.apply({.kind = RecordKind::kJob, .payload = std::as_bytes(std::span(text))});
  RowTable& table = *state.shard().tables()[0];
  const std::vector<float> gradients(size_t{10'000} * 16, 1.0f);
  std::vector<uint64_t> ids(10'000);
  for (uint64_t batch = 0; batch < 40; ++batch) {
    std::iota(ids.begin(), ids.end(), batch * ids.size());
    table.push(ids, gradients, 1, 1);
  }
  EXPECT_EQ(table.statistics().rows + table.statistics().spilled_rows, 400'000);
  EXPECT_LT(test::resident_bytes() - before, 48 << 20);
}

TEST(SpillStoreTest, PullsOfSpilledRowsLeaveThemThere) {
  const TemporaryFolder folder;
  const TableOptions options = spilling(options_of(Rule::kAdd), 40);
  RowTable table(options, store_in(folder / "cold", options));
  const auto pushes = some_pushes(10, 3000, kWidth);
  for (const Push& push : pushes) apply(table, push);
  const auto rows = rows_of(table);
  const int64_t spilled = table.statistics().spilled_rows;
  std::vector<uint64_t> ids;
  for (const auto& [id, row] : rows) {
    ids.push_back(id);
    ids.push_back(id);
  }
  std::vector<float> weights(ids.size() * kWidth);
  table.pull(ids, weights, RowTable::Unknown::kZeros);
  EXPECT_EQ(table.statistics().spilled_rows, spilled);
  EXPECT_GT(spilled, 200);
  for (size_t i = 0; i < ids.size(); ++i) {
    ASSERT_TRUE(std::equal(rows.at(ids[i]).weights.begin(), rows.at(ids[i]).weights.end(),
                           weights.begin() + static_cast<int64_t>(i) * kWidth));
  }
}

TEST(SpillStoreTest, ATableGoesOnFromItsFileAndTheCheckpoint) {
  const TemporaryFolder folder;
  const TableOptions options = spilling(options_of(Rule::kAdam), 100);
  RowTable straight(options, store_in(folder / "straight", options));
  auto stored = std::make_unique<RowTable>(options, store_in(folder / "cold0", options));
  for (const Push& push : some_pushes(90, 1000, kWidth)) {
    apply(straight, push);
    apply(*stored, push);
    if (push.step % 30 != 0) continue;
    const std::string number = std::to_string(push.step);
    write_table_file(*stored, folder / "table");
    stored->spill_store()->checkpoint(folder / ("checkpoint" + number));
    SpillStore::restore(folder / ("checkpoint" + number), folder / ("cold" + number));
    stored = std::make_unique<RowTable>(options, store_in(folder / ("cold" + number), options));
    load_table_file(folder / "table", *stored, [](uint64_t) { return true; });
    EXPECT_EQ(stored->statistics().rows, straight.statistics().rows);
    EXPECT_EQ(stored->statistics().spilled_rows, straight.statistics().spilled_rows);
  }
  EXPECT_EQ(rows_of(*stored), rows_of(straight));
  // Rows of both go into the tables of other servers, too.
  RowTable elsewhere(options, store_in(folder / "elsewhere", options));
  stored->for_each([&](const RowView& row) { elsewhere.insert(row); });
  EXPECT_EQ(rows_of(elsewhere), rows_of(straight));
  const auto cold_row = [&] {
    uint64_t id = 0;
    elsewhere.spill_store()->for_each([&](const RowView& row) { id = row.id; });
    return id;
  }();
  const std::vector<float> weights(kWidth);
  const std::vector<float> state(1 + 2 * kWidth);
  EXPECT_EQ(message_of<c10::ValueError>([&] {
              elsewhere.insert({.id = cold_row, .pushes = 1, .weights = weights, .state = state});
            }),
            "table \"t\": row " + std::to_string(cold_row) + ": is there already");
}

}  // namespace spill_store_test
}  // namespace cohort::ps
