// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/row_table.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <numeric>

#include "cohort/base/error.h"
#include "cohort/ps/table/initial_weights.h"

#include "tests/ps/table_support.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace row_table_test {

using test::message_of;

constexpr int64_t kWidth = 5;

TableOptions options_of(Rule rule) {
  return {.name = "clicks", .width = kWidth, .seed = 3, .rule = {.rule = rule}};
}

// What a table does, said plainly.
struct Model {
  TableOptions options;
  std::map<uint64_t, OwnedRow> rows{};

  void push(const Push& push) {
    const InitialWeights initial(options);
    for (size_t i = 0; i < push.ids.size(); ++i) {
      OwnedRow& row = rows[push.ids[i]];
      if (row.pushes == 0) {
        row.weights.resize(kWidth);
        row.state.resize(static_cast<size_t>(state_width(options.rule.rule, kWidth)));
        initial.fill(push.ids[i], row.weights);
        initialise_state(options.rule, row.state);
      }
      update(options.rule, push.step, row.weights, row.state,
             std::span(push.gradients).subspan(i * kWidth, kWidth));
      row.last_push = push.now;
      ++row.pushes;
    }
  }
  void evict(uint32_t now) {
    std::erase_if(rows, [&](const auto& entry) {
      const OwnedRow& row = entry.second;
      const int64_t age = now - row.last_push;
      const double score = row.pushes * std::pow(options.eviction.decay, age / 86400);
      return (options.eviction.time_to_live_s > 0 && age >= options.eviction.time_to_live_s) ||
             score < options.eviction.minimum_score;
    });
  }
};

TEST(RowTableTest, HoldsWhatAMapOfRowsWould) {
  for (const Rule rule : {Rule::kAdd, Rule::kSgd, Rule::kMomentum, Rule::kAdagrad,
                          Rule::kRowwiseAdagrad, Rule::kAdam, Rule::kFtrl}) {
    TableOptions options = options_of(rule);
    options.eviction = {.time_to_live_s = 86400, .minimum_score = 1.5};
    RowTable table(options);
    Model model{options};
    for (const Push& push : some_pushes(200, 2000, kWidth)) {
      apply(table, push);
      model.push(push);
      if (push.step % 40 == 0) {
        table.evict(push.now);
        model.evict(push.now);
      }
    }
    EXPECT_GT(table.statistics().evicted, 100);
    EXPECT_EQ(rows_of(table), model.rows) << to_string(rule);
    EXPECT_EQ(table.statistics().rows, static_cast<int64_t>(model.rows.size()));
  }
}

TEST(RowTableTest, PullsGiveEveryIdItsWeightsAlsoRepeatedOnes) {
  RowTable table(options_of(Rule::kSgd));
  const auto pushes = some_pushes(30, 1000, kWidth);
  for (const Push& push : pushes) apply(table, push);
  const auto rows = rows_of(table);
  std::vector<uint64_t> ids;
  for (const Push& push : pushes) ids.insert(ids.end(), push.ids.begin(), push.ids.end());
  std::vector<float> weights(ids.size() * kWidth);
  table.pull(ids, weights, RowTable::Unknown::kZeros);
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<float> found(weights.begin() + static_cast<int64_t>(i) * kWidth,
                                   weights.begin() + static_cast<int64_t>(i + 1) * kWidth);
    ASSERT_EQ(found, rows.at(ids[i]).weights) << i;
  }
}

TEST(RowTableTest, APullMakesNoRowAndShowsWhatTheFirstPushBeginsWith) {
  RowTable table(options_of(Rule::kAdd));
  const std::vector<uint64_t> ids = {7, 0, 7, ~uint64_t{0}};
  std::vector<float> weights(ids.size() * kWidth, 9);
  table.pull(ids, weights, RowTable::Unknown::kInitial);
  EXPECT_EQ(table.statistics().rows, 0);
  const std::vector<float> first(weights.begin(), weights.begin() + kWidth);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), weights.begin() + 2 * kWidth));
  EXPECT_FALSE(std::equal(first.begin(), first.end(), weights.begin() + kWidth));
  table.push(std::vector<uint64_t>{7}, std::vector<float>(kWidth, 0), 1, 1);
  EXPECT_EQ(rows_of(table).at(7).weights, first);
  table.pull(ids, weights, RowTable::Unknown::kZeros);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), weights.begin()));
  EXPECT_EQ(weights[kWidth], 0);
}

TEST(RowTableTest, ARepeatedIdOfAPushIsUpdatedTwice) {
  TableOptions options = options_of(Rule::kAdd);
  options.initializer.kind = Initializer::Kind::kZeros;
  RowTable table(options);
  table.push(std::vector<uint64_t>{4, 4, 4}, std::vector<float>(3 * kWidth, 2), 1, 1);
  EXPECT_EQ(rows_of(table).at(4).weights, std::vector<float>(kWidth, 6));
  EXPECT_EQ(rows_of(table).at(4).pushes, 3);
}

TEST(RowTableTest, CountedIdsGetARowAtTheirNthPush) {
  TableOptions options = options_of(Rule::kAdd);
  options.initializer.kind = Initializer::Kind::kZeros;
  options.entry = {.kind = EntryPolicy::Kind::kCount, .pushes = 3};
  RowTable table(options);
  const std::vector<uint64_t> id = {42};
  const std::vector<float> gradient(kWidth, 1);
  std::vector<float> weights(kWidth, 9);
  for (uint32_t push = 1; push <= 2; ++push) {
    table.push(id, gradient, push, push);
    EXPECT_EQ(counts_of(table), (std::map<uint64_t, uint32_t>{{42, push}}));
  }
  table.pull(id, weights, RowTable::Unknown::kInitial);
  EXPECT_EQ(weights, std::vector<float>(kWidth, 0));
  EXPECT_EQ(table.statistics().refused, 2);
  table.push(id, gradient, 3, 3);
  EXPECT_EQ(rows_of(table).at(42).weights, gradient);  // Of the third alone.
  EXPECT_TRUE(counts_of(table).empty());
}

TEST(RowTableTest, EachPushAdmitsWithTheGivenProbability) {
  TableOptions options = options_of(Rule::kAdd);
  options.entry = {.kind = EntryPolicy::Kind::kProbability, .probability = 0.25};
  RowTable table(options);
  std::vector<uint64_t> ids(10000);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> gradients(ids.size() * kWidth);
  table.push(ids, gradients, 1, 1);
  // Binomial of 10,000 and a quarter: 5 standard deviations are 217.
  EXPECT_NEAR(static_cast<double>(table.statistics().rows), 2500, 217);
  table.push(ids, gradients, 2, 1);
  EXPECT_NEAR(static_cast<double>(table.statistics().rows), 4375, 250);
}

TableOptions capped(AtCap at_cap, int64_t rows) {
  TableOptions options = options_of(Rule::kRowwiseAdagrad);
  options.at_cap = at_cap;
  options.memory_cap_bytes = rows * row_bytes(options);
  return options;
}

TEST(RowTableTest, AFullTableRefusesNewRowsAndUpdatesOldOnes) {
  const TableOptions options = capped(AtCap::kRefuse, 100);
  RowTable table(options);
  RowTable unlimited(options_of(Rule::kRowwiseAdagrad));
  const auto pushes = some_pushes(40, 1000, kWidth);
  for (const Push& push : pushes) {
    apply(table, push);
    apply(unlimited, push);
  }
  const auto rows = rows_of(table);
  EXPECT_EQ(rows.size(), 100);
  const auto all = rows_of(unlimited);
  for (const auto& [id, row] : rows) EXPECT_EQ(row, all.at(id));
  EXPECT_EQ(table.statistics().refused + 0, [&] {
    int64_t applied = 0;
    for (const auto& [id, row] : rows) applied += row.pushes;
    return static_cast<int64_t>(pushes.size() * 50) - applied;
  }());
}

TEST(RowTableTest, AFullTableDropsItsLeastUsedSixteenth) {
  RowTable table(capped(AtCap::kEvictLeastUsed, 160));
  const auto push_one = [&](uint64_t id, uint32_t now) {
    table.push(std::vector<uint64_t>{id}, std::vector<float>(kWidth, 1), 1, now);
  };
  // Row i has 1 + i / 40 pushes; of those with one, the last ones are the oldest.
  for (uint64_t id = 0; id < 160; ++id) push_one(id, 1000 - static_cast<uint32_t>(id));
  for (uint64_t id = 0; id < 160; ++id) {
    for (uint64_t more = 0; more < id / 40; ++more) push_one(id, 2000);
  }
  EXPECT_EQ(table.statistics().rows, 160);
  push_one(5000, 3000);
  const auto rows = rows_of(table);
  EXPECT_EQ(rows.size(), 151);
  for (uint64_t id = 0; id < 160; ++id) EXPECT_EQ(rows.contains(id), id < 30 || id >= 40) << id;
  EXPECT_EQ(table.statistics().evicted, 10);
}

TEST(RowTableTest, MemoryStaysBelowTheCap) {
  TableOptions options = capped(AtCap::kEvictLeastUsed, 50'000);
  options.entry = {.kind = EntryPolicy::Kind::kCount, .pushes = 2};
  RowTable table(options);
  std::vector<uint64_t> ids(10'000);
  const std::vector<float> gradients(ids.size() * kWidth, 1);
  for (uint64_t round = 0; round < 40; ++round) {
    std::iota(ids.begin(), ids.end(), round * ids.size());
    table.push(ids, gradients, 1, 1);
    table.push(ids, gradients, 1, 2);
    // Rows come in huge pages: up to one more.
    ASSERT_LE(table.statistics().bytes, options.memory_cap_bytes + (2 << 20));
  }
  EXPECT_GT(table.statistics().evicted, 250'000);
  // Pushes that are never repeated fill the counts alone: they are halved away.
  for (uint64_t round = 40; round < 60; ++round) {
    std::iota(ids.begin(), ids.end(), round * ids.size());
    table.push(ids, gradients, 1, 3);
    ASSERT_LE(table.statistics().bytes, options.memory_cap_bytes + (2 << 20));
  }
  EXPECT_GT(table.statistics().counted_ids, 1000);
}

TEST(RowTableTest, ARowOfWidth16TakesAtMost110Bytes) {
  RowTable table({.name = "t", .width = 16});
  std::vector<uint64_t> ids(1000);
  const std::vector<float> gradients(ids.size() * 16, 1);
  int64_t most = 0;
  for (uint64_t round = 0; round < 300; ++round) {
    std::iota(ids.begin(), ids.end(), round * ids.size());
    table.push(ids, gradients, 1, 1);
    if (round >= 200) most = std::max(most, table.statistics().bytes / table.statistics().rows);
  }
  EXPECT_LE(most, 110);
}

TEST(RowTableTest, ASmallTableTakesLittle) {
  RowTable table({.name = "t", .width = 16});
  for (uint64_t id = 0; id < 100; ++id) {
    table.push(std::vector<uint64_t>{id}, std::vector<float>(16, 1), 1, 1);
  }
  EXPECT_LE(table.statistics().bytes, 64 << 10);
}

TEST(RowTableTest, BadInputIsNamed) {
  TableOptions options = options_of(Rule::kSgd);
  options.width = 0;
  EXPECT_EQ(message_of<ConfigError>([&] { RowTable table(options); }),
            "table \"clicks\": width: expected 1 to 1048576 weights a row, found 0");
  options = options_of(Rule::kSgd);
  options.entry.pushes = 257;
  EXPECT_EQ(message_of<ConfigError>([&] { RowTable table(options); }),
            "table \"clicks\": entry.pushes: expected 1 to 256, found 257");
  options = options_of(Rule::kSgd);
  options.rule.learning_rate = NAN;
  EXPECT_EQ(message_of<ConfigError>([&] { RowTable table(options); }),
            "table \"clicks\": learning_rate: expected a finite number above 0, found nan");
  options = capped(AtCap::kSpill, 100);
  EXPECT_EQ(message_of<ConfigError>([&] { RowTable table(options); }),
            "table \"clicks\": at_cap spill: expected a spill store, found none");
  RowTable table(options_of(Rule::kSgd));
  const std::vector<float> weights(kWidth);
  table.insert({.id = 8, .pushes = 1, .weights = weights});
  EXPECT_EQ(message_of<c10::ValueError>(
                [&] { table.insert({.id = 8, .pushes = 1, .weights = weights}); }),
            "table \"clicks\": row 8: is there already");
  EXPECT_EQ(message_of<c10::ValueError>([&] { table.insert({.id = 9, .weights = weights}); }),
            "table \"clicks\": row 9: expected 5 weights, 0 floats of state and 1 push, found 5, 0 "
            "and 0");
}

TEST(TableOptionsTest, TextGivesTheSameOptions) {
  TableOptions options = capped(AtCap::kEvictLeastUsed, 100);
  options.rule = {.rule = Rule::kFtrl, .learning_rate = 0.1F, .schedule = {.decay = 1.0 / 3}};
  options.entry = {.kind = EntryPolicy::Kind::kProbability, .probability = 0.7};
  const std::string text = to_text(options);
  EXPECT_EQ(to_text(table_options_of(text)), text);
  EXPECT_EQ(table_options_of(text).rule.learning_rate, 0.1F);
  EXPECT_EQ(table_options_of(text).rule.schedule.decay, 1.0 / 3);
  const auto complaint = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return message_of<ConfigError>([&] { table_options_of(changed); });
  };
  EXPECT_EQ(complaint("evict_least_used", "evict"),
            "options of a table: expected one of refuse, evict_least_used, spill, found \"evict\"");
  EXPECT_EQ(complaint("\"decay\"", "\"delay\":1,\"decay\""),
            "options of a table: unknown: eviction.delay");
  EXPECT_NE(complaint("\"width\":5", "\"width\":\"5\"").find("as JSON"), std::string::npos);
}

TEST(TableOptionsTest, RowsOfOtherOptionsAreRefused) {
  const TableOptions stored = options_of(Rule::kSgd);
  TableOptions wanted = stored;
  wanted.rule.learning_rate = 7;
  wanted.eviction.time_to_live_s = 9;
  check_same_rows(stored, wanted);
  wanted.rule.rule = Rule::kAdam;
  EXPECT_EQ(message_of<ConfigError>([&] { check_same_rows(stored, wanted); }),
            "table \"clicks\": rule: stored rows have sgd, the options say adam");
  wanted = stored;
  wanted.width = 6;
  EXPECT_EQ(message_of<ConfigError>([&] { check_same_rows(stored, wanted); }),
            "table \"clicks\": width: stored rows have 5, the options say 6");
}

}  // namespace row_table_test
}  // namespace cohort::ps
