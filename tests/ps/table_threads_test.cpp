// SPDX-License-Identifier: Apache-2.0
// Tables whose rows several threads have: the same bits as with one.
#include "cohort/ps/table/table_threads.h"

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/ps/server/forked_task.h"
#include "cohort/ps/table/table_file.h"
#include "cohort/ps/wire/bfloat16.h"

#include "tests/ps/cluster.h"
#include "tests/ps/scratch_folder.h"
#include "tests/ps/table_support.h"
#include "tests/support/eventually.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace table_threads_test {

using test::eventually;
using test::message_of;

constexpr std::chrono::seconds kSoon{10};
constexpr int64_t kWidth = 3;
constexpr size_t kBatch = 9000;  // Enough to be divided among 8 threads.

std::shared_ptr<TableThreads> threads_of(int count) {
  return std::make_shared<TableThreads>(count);
}

// Names of this process's threads that begin as those of tables do.
std::multiset<std::string> names_of_threads() {
  std::multiset<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    if (std::ifstream file(task.path() / "comm"); std::getline(file, name))
      if (name.starts_with("ps-table-")) names.insert(name);
  }
  return names;
}

// How often the thread ps-table-1 has gone to sleep; -1 while it runs, or wants to.
int64_t sleeps_of_a_worker() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string line;
    bool is_worker = false, is_asleep = false;
    while (std::getline(status, line)) {
      is_worker |= line == "Name:\tps-table-1";
      is_asleep |= line.starts_with("State:\tS");
      constexpr std::string_view kSleeps = "voluntary_ctxt_switches:";
      if (is_worker && line.starts_with(kSleeps))
        return is_asleep ? std::stoll(line.substr(kSleeps.size())) : -1;
    }
  }
  return -1;
}

TEST(TableThreadsTest, EachNumberIsCalledOnceInARound) {
  for (const int count : {1, 2, 3, 8}) {
    TableThreads threads(count);
    ASSERT_EQ(threads.count(), static_cast<size_t>(count));
    std::vector<std::thread::id> first(threads.count());
    threads.run([&](size_t number) { first[number] = std::this_thread::get_id(); });
    EXPECT_EQ(first[0], std::this_thread::get_id());
    EXPECT_EQ(std::set(first.begin(), first.end()).size(), first.size());
    std::vector<int64_t> calls(threads.count());
    for (int round = 0; round < 100; ++round) {
      threads.run(
          [&](size_t number) { calls[number] += first[number] == std::this_thread::get_id(); });
    }
    EXPECT_EQ(calls, std::vector<int64_t>(threads.count(), 100));
  }
}

TEST(TableThreadsTest, TheLowestNumbersErrorIsTheCallersWhenAllHaveEnded) {
  TableThreads threads(4);
  std::atomic<int> ended = 0;
  for (int round = 0; round < 50; ++round) {
    ended = 0;
    EXPECT_EQ(message_of<std::runtime_error>([&] {
                threads.run([&](size_t number) {
                  ++ended;
                  if (number >= 2) throw std::runtime_error("thread " + std::to_string(number));
                });
              }),
              "thread 2");
    EXPECT_EQ(ended, 4);
    threads.run([&](size_t) { ++ended; });  // Nothing is left of the error.
    EXPECT_EQ(ended, 8);
  }
}

TEST(TableThreadsTest, TheyHaveNamesAndEndWithTheirOwner) {
  {
    TableThreads threads(3);
    threads.run([](size_t) {});
    const std::multiset<std::string> names{"ps-table-1", "ps-table-2"};
    EXPECT_TRUE(eventually([&] { return names_of_threads() == names; }, kSoon));
  }
  // The system may list a thread for a moment after it was joined.
  EXPECT_TRUE(eventually([] { return names_of_threads().empty(); }, kSoon));
}

TEST(TableThreadsTest, TheirNumberIsChecked) {
  for (const int count : {-1, 0, 65}) {
    EXPECT_EQ(message_of<ConfigError>([&] { TableThreads threads(count); }),
              "table_threads: expected 1 to 64, got " + std::to_string(count));
  }
}

// What does not depend on the number of threads.
auto events_of(const RowTable& table) {
  const TableStatistics all = table.statistics();
  return std::tuple(all.rows, all.spilled_rows, all.counted_ids, all.created, all.evicted,
                    all.demoted, all.promoted, all.refused);
}

// A half of the ids is pushed to often, also twice in a push, a quarter now and then, a quarter once.
std::vector<Push> large_pushes(int64_t count) {
  std::mt19937_64 random(19);
  std::uniform_real_distribution<float> gradient(-1, 1);
  std::vector<Push> pushes;
  for (int64_t step = 1; step <= count; ++step) {
    Push push{.step = step, .now = 1'700'000'000 + static_cast<uint32_t>(step) * 600};
    const size_t batch = step % 5 == 0 ? 40 : kBatch;  // Also such as are not divided.
    for (size_t i = 0; i < batch; ++i) {
      const std::array<uint64_t, 4> limits = {3'000, 3'000, 20'000, uint64_t{1} << 40};
      push.ids.push_back(random() % limits[random() % 4] * 0x10001);
    }
    push.gradients.resize(batch * kWidth);
    for (float& number : push.gradients) number = gradient(random);
    pushes.push_back(std::move(push));
  }
  return pushes;
}

TableOptions options_of(Rule rule, AtCap at_cap = AtCap::kRefuse, int64_t cap_rows = 0,
                        const EntryPolicy& entry = {}) {
  TableOptions options{.name = "t",
                       .width = kWidth,
                       .rule = {.rule = rule},
                       .entry = entry,
                       .eviction = {.time_to_live_s = 12'000},
                       .at_cap = at_cap};
  options.memory_cap_bytes = cap_rows * row_bytes(options);
  return options;
}

// A table, and its folder if it spills.
class Made {
 public:
  Made(const TableOptions& options, int threads) {
    std::unique_ptr<SpillStore> store;
    if (options.at_cap == AtCap::kSpill) {
      store = std::make_unique<SpillStore>(
          scratch_.path("cold"),
          SpillStore::Options{.width = kWidth,
                              .state_width = state_width(options.rule.rule, kWidth),
                              .memory_bytes = 8 << 20});
    }
    table_ = std::make_unique<RowTable>(options, std::move(store), threads_of(threads));
  }
  RowTable& operator*() const { return *table_; }
  RowTable* operator->() const { return table_.get(); }

 private:
  ScratchFolder scratch_;
  std::unique_ptr<RowTable> table_;
};

// What a table shows while it is pushed to: weights after each push, rows, counts and events at the
// end.
struct Shown {
  std::vector<std::vector<float>> pulled;
  std::map<uint64_t, OwnedRow> rows;
  std::map<uint64_t, uint32_t> counts;
  decltype(events_of(std::declval<RowTable>())) events;
  bool operator==(const Shown&) const = default;
};

Shown shown_by(const TableOptions& options, int threads, const std::vector<Push>& pushes) {
  const Made table(options, threads);
  Shown shown;
  for (const Push& push : pushes) {
    apply(*table, push);
    if (push.step % 4 == 0) table->evict(push.now);
    auto& weights = shown.pulled.emplace_back(push.ids.size() * kWidth);
    std::vector<uint64_t> ids = push.ids;
    for (size_t i = 0; i < ids.size(); i += 3) ids[i] += 7;  // Ids without a row.
    table->pull(ids, weights, RowTable::Unknown::kInitial);
    std::vector<uint16_t> bfloat16s(weights.size()), rounded(weights.size());
    table->pull(ids, bfloat16s, RowTable::Unknown::kInitial);
    round_to_bfloat16(weights, rounded);
    EXPECT_EQ(bfloat16s, rounded) << "step " << push.step;
  }
  shown.rows = rows_of(*table);
  shown.counts = counts_of(*table);
  shown.events = events_of(*table);
  return shown;
}

TEST(TableThreadsTest, LargeOperationsAreDividedAndSmallOnesAreNot) {
  constexpr int kWide = 128;  // Rows of 1 KiB and more: a file has about 700 in a block.
  TableOptions options = options_of(Rule::kAdam);
  options.width = kWide;
  options.eviction.time_to_live_s = 1000;
  RowTable table(options, nullptr, threads_of(2));
  const auto sleeps = [] {  // Two readings that are apart are equal.
    int64_t before = -1;
    EXPECT_TRUE(eventually(
        [&] {
          const int64_t now = sleeps_of_a_worker();
          return std::exchange(before, now) == now && now > 0;
        },
        kSoon));
    return before;
  };
  const auto wakes = [&](const std::function<void()>& operation) {
    const int64_t before = sleeps();
    operation();  // It returns when the worker has done its part.
    return sleeps() > before;
  };
  std::vector<uint64_t> ids(4'000);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<float> values(ids.size() * kWide, 0.5F);
  const auto few = [](const auto& all, size_t count) { return std::span(all).first(count); };
  const auto weights = [&](size_t count) { return std::span(values).first(count * kWide); };
  EXPECT_TRUE(wakes([&] { table.push(ids, values, 1, 1000); })) << "a large push";
  EXPECT_TRUE(wakes([&] { table.pull(ids, values, RowTable::Unknown::kZeros); })) << "a large pull";
  EXPECT_FALSE(wakes([&] { table.push(few(ids, 100), weights(100), 2, 1000); })) << "a small push";
  EXPECT_FALSE(wakes([&] { table.pull(few(ids, 100), weights(100), RowTable::Unknown::kZeros); }))
      << "a small pull";
  EXPECT_TRUE(wakes([&] { table.evict(3000); })) << "an eviction";
  EXPECT_EQ(table.statistics().rows, 0);
  const std::vector<float> state(state_width(options.rule.rule, kWide));
  std::vector<RowView> rows;
  for (const uint64_t id : few(ids, 700))
    rows.push_back({id, 1000, 1, std::span(values).first(kWide), state});
  EXPECT_TRUE(wakes([&] { table.insert(rows); })) << "a block of a file";
  EXPECT_FALSE(wakes([&] {
    table.insert(std::vector<RowView>{{4'000, 1000, 1, std::span(values).first(kWide), state}});
  })) << "one row";
}

TEST(TableThreadsTest, ATableOfSeveralThreadsHoldsTheBitsOfOne) {
  using Kind = EntryPolicy::Kind;
  const auto pushes = large_pushes(24);
  for (const TableOptions& options :
       {options_of(Rule::kRowwiseAdagrad), options_of(Rule::kAdam),
        options_of(Rule::kFtrl, AtCap::kRefuse, 15'000),
        options_of(Rule::kAdam, AtCap::kEvictLeastUsed, 60'000),
        options_of(Rule::kSgd, AtCap::kRefuse, 0, {.kind = Kind::kCount, .pushes = 3}),
        options_of(Rule::kSgd, AtCap::kRefuse, 40'000, {.kind = Kind::kCount, .pushes = 2}),
        options_of(Rule::kSgd, AtCap::kEvictLeastUsed, 40'000, {.kind = Kind::kCount, .pushes = 3}),
        options_of(Rule::kMomentum, AtCap::kRefuse, 0,
                   {.kind = Kind::kProbability, .probability = 0.3})}) {
    const Shown one = shown_by(options, 1, pushes);
    ASSERT_GT(one.rows.size(), 1000) << to_text(options);
    ASSERT_GT(std::get<4>(one.events), 0) << to_text(options);  // Evicted.
    for (const int threads : {2, 3, 8})
      EXPECT_TRUE(shown_by(options, threads, pushes) == one) << threads << ' ' << to_text(options);
  }
}

// Its portions, a sixteenth of 60,000 rows, are divided among two and three threads.
TEST(TableThreadsTest, ATableThatSpillsHoldsTheBitsOfOne) {
  const TableOptions options = options_of(Rule::kAdam, AtCap::kSpill, 60'000);
  const auto pushes = large_pushes(24);
  const Shown one = shown_by(options, 1, pushes);
  ASSERT_GT(std::get<5>(one.events), 0);  // Demoted.
  ASSERT_GT(std::get<6>(one.events), 0);  // Promoted.
  for (const int threads : {2, 3, 8}) EXPECT_TRUE(shown_by(options, threads, pushes) == one);
}

TEST(TableThreadsTest, AFileOfOneNumberOfThreadsLoadsIntoAnother) {
  const ScratchFolder folder;
  const auto pushes = large_pushes(12);
  const std::string path = folder.path("table");
  for (const TableOptions& options :
       {options_of(Rule::kAdam), options_of(Rule::kSgd, AtCap::kRefuse, 0,
                                            {.kind = EntryPolicy::Kind::kCount, .pushes = 2})}) {
    const Made straight(options, 1);
    auto stored = std::make_unique<RowTable>(options, nullptr, threads_of(3));
    std::vector<int> next = {2, 8, 1, 3};
    for (const Push& push : pushes) {
      apply(*straight, push);
      apply(*stored, push);
      if (push.step % 3 != 0) continue;
      write_table_file(*stored, path);
      stored = std::make_unique<RowTable>(options, nullptr, threads_of(next.back()));
      next.pop_back();
      load_table_file(path, *stored, [](uint64_t) { return true; });
      EXPECT_EQ(rows_of(*stored), rows_of(*straight));
      EXPECT_EQ(counts_of(*stored), counts_of(*straight));
    }
    EXPECT_TRUE(next.empty());
  }
}

// Whatever the number of threads, the rows before the first that is refused are in, none behind it.
TEST(TableThreadsTest, AnInsertionThatIsRefusedLeavesTheRowsBeforeIt) {
  const std::vector<float> weights(kWidth, 1), other(kWidth, 2);
  std::vector<RowView> rows(kBatch);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = {.id = i * 0x10001, .last_push = 1, .pushes = 1, .weights = weights};
  struct Case {
    const char* what;
    AtCap at_cap;
    int64_t cap_rows;
    std::vector<size_t> repeated;  // Have the id of the row 1000 before.
    std::vector<size_t> unformed;
    size_t first;  // That is refused.
  };
  for (const Case& tried :
       {Case{"no room", AtCap::kRefuse, 5'000, {}, {}, 5'000},
        Case{"repeated", AtCap::kRefuse, 0, {4000, 3001, 5999}, {}, 3001},
        Case{"no form", AtCap::kRefuse, 0, {5999}, {4999, 5000, 1234}, 1234},
        Case{"the first", AtCap::kRefuse, 0, {}, {0, 3}, 0},
        Case{"evicts", AtCap::kEvictLeastUsed, 110'000, {2000}, {1999}, 1999}}) {
    std::vector<RowView> its = rows;
    for (const size_t i : tried.repeated) its[i].id = its[i - 1000].id;
    for (const size_t i : tried.unformed) its[i].pushes = 0;
    std::string first_text;
    for (const int threads : {1, 2, 3, 8}) {
      RowTable table(options_of(Rule::kSgd, tried.at_cap, tried.cap_rows), nullptr,
                     threads_of(threads));
      const std::string text = message_of<c10::ValueError>([&] { table.insert(its); });
      if (threads == 1) first_text = text;
      EXPECT_EQ(text, first_text) << tried.what << ' ' << threads;
      std::map<uint64_t, OwnedRow> expected;
      for (size_t i = 0; i < tried.first; ++i)
        expected[its[i].id] = {1, 1, {weights.begin(), weights.end()}, {}};
      EXPECT_TRUE(rows_of(table) == expected) << tried.what << ' ' << threads;
      EXPECT_EQ(table.statistics().rows, static_cast<int64_t>(tried.first));
      // The table works on.
      table.push(std::vector<uint64_t>{rows[0].id}, other, 1, 2);
      EXPECT_EQ(table.statistics().rows, std::max<int64_t>(1, static_cast<int64_t>(tried.first)));
    }
    EXPECT_NE(first_text, "nothing was thrown") << tried.what;
  }
}

TEST(TableThreadsTest, AForkedChildWritesTheTableOfItsMomentWhilePushesGoOn) {
  const ScratchFolder folder;
  const TableOptions options = options_of(Rule::kAdam);
  const auto pushes = large_pushes(16);
  RowTable table(options, nullptr, threads_of(3));
  RowTable one(options);
  std::vector<std::unique_ptr<ForkedTask>> children;
  std::vector<std::map<uint64_t, OwnedRow>> expected;
  size_t ended = 0;
  for (const Push& push : pushes) {
    apply(table, push);
    apply(one, push);
    if (push.step % 4 != 0) continue;
    const std::string path = folder.path("table." + std::to_string(children.size()));
    children.push_back(
        std::make_unique<ForkedTask>([&table, path] { write_table_file(table, path); },
                                     [&ended](const std::string& error) {
                                       EXPECT_EQ(error, "");
                                       ++ended;
                                     }));
    expected.push_back(rows_of(one));
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (const auto& child : children) {
    while (!child->poll() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_EQ(ended, children.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    RowTable loaded(options, nullptr, threads_of(2));
    load_table_file(folder.path("table." + std::to_string(i)), loaded,
                    [](uint64_t) { return true; });
    EXPECT_TRUE(rows_of(loaded) == expected[i]) << i;
  }
  EXPECT_TRUE(rows_of(table) == rows_of(one));
}

JobOptions sync_job() {
  return {.mode = Mode::kSync,
          .reduce = Reduce::kMean,
          .trainers = 2,
          .servers = 1,
          .dense_rule = {.rule = Rule::kSgd, .learning_rate = 1},
          .tables = {{.name = "rows", .width = kWidth, .rule = {.rule = Rule::kAdam}}}};
}

std::vector<uint64_t> batch_of(uint64_t step, uint32_t trainer) {
  std::mt19937_64 random(100 * step + trainer);
  std::set<uint64_t> ids;
  while (ids.size() < kBatch) ids.insert(random() % 20'000);
  return {ids.begin(), ids.end()};
}

std::vector<float> weights_of(Client& client, const std::vector<uint64_t>& ids) {
  std::vector<float> weights(ids.size() * kWidth);
  const PullRows rows{.table = 0, .ids = ids, .weights = weights};
  client.pull(std::span(&rows, 1), {}).wait();
  return weights;
}

// Steps [begin, end) of two trainers, whose gradients hang on what they pull.
void train(Cluster& cluster, uint64_t begin, uint64_t end) {
  const auto run = [&](uint32_t trainer) {
    const auto client = cluster.client(trainer, sync_job());
    for (uint64_t step = begin; step < end; ++step) {
      const auto ids = batch_of(step, trainer);
      auto gradients = weights_of(*client, ids);
      for (float& number : gradients) number = 0.5f * number + static_cast<float>(trainer) - 0.3f;
      const PushRows pushed{0, ids, gradients};
      client->push(std::span(&pushed, 1), {});
    }
    client->flush();
  };
  std::jthread other([&] { run(1); });
  run(0);
}

std::vector<float> all_weights(Cluster& cluster) {
  std::vector<uint64_t> all(20'000);
  for (uint64_t id = 0; id < all.size(); ++id) all[id] = id;
  return weights_of(*cluster.client(0, sync_job()), all);
}

TEST(TableThreadsTest, TwoTrainersGetTheBitsOfAServerOfOneThread) {
  constexpr uint64_t kSteps = 6;
  Cluster one(1);
  train(one, 0, kSteps);
  const auto expected = all_weights(one);
  Cluster two(1, {.table_threads = 2, .snapshot_log_bytes = 200'000});
  EXPECT_TRUE(names_of_threads().contains("ps-table-1"));
  train(two, 0, kSteps);
  EXPECT_EQ(all_weights(two), expected);
  // Started again it has another number of threads: the snapshot and the log give the same rows.
  two.options(0).table_threads = 3;
  two.restart(0);
  EXPECT_EQ(all_weights(two), expected);
  two.client(0, sync_job())->save(two.path("checkpoint"));
  Cluster loaded(1, {.load = two.path("checkpoint"), .table_threads = 2});
  EXPECT_EQ(all_weights(loaded), expected);
  EXPECT_EQ(message_of<ConfigError>([] { Cluster(1, {.table_threads = 65}); }),
            "table_threads: expected 1 to 64, got 65");
}

}  // namespace table_threads_test
}  // namespace cohort::ps
