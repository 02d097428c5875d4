// SPDX-License-Identifier: Apache-2.0
// What an embedding table does by itself, without a network: rows pulled and pushed in a second on
// one core or several, memory of a row, files, and a table that is four times as large as its
// memory.
//
//   build/release/bin/row_table --folder FOLDER [--rows 1000000 --rows 50000000] [--table-threads 2]
//
// Prints one JSON line. Rows of width 16 under row-wise Adagrad; batches of random distinct ids.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <unistd.h>
#include <vector>

#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/ps/table/table_file.h"
#include "cohort/ps/table/table_threads.h"

#include "bench/median.h"

namespace {

namespace fs = std::filesystem;
using cohort::bench::median_of;
using cohort::ps::RowTable;
using cohort::ps::SpillStore;
using cohort::ps::TableOptions;
using cohort::ps::TableThreads;
using Clock = std::chrono::steady_clock;

constexpr size_t kWidth = 16;
using Batches = std::vector<std::vector<uint64_t>>;

struct Options {
  std::vector<int64_t> rows = {1'000'000, 50'000'000};
  int64_t cold_rows = 8'000'000;
  size_t batch = 10'000;
  int64_t rounds = 7;
  std::string folder;
  int table_threads = 1;
};

// Of all threads of this process.
double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0;
  int64_t resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::vector<float> random_gradients(size_t count) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Batches of distinct ids in [0, rows): of equal probability, or as Zipf's law has them, id i with
// one that falls as 1 / (i + 1).
enum class Law { kUniform, kZipf };
Batches random_batches(Law law, int64_t rows, size_t batch, size_t count) {
  static std::mt19937_64 random(2);  // Other ids in every call.
  const auto draw = [&] {
    const double unit = std::uniform_real_distribution<double>()(random);
    const auto all = static_cast<double>(rows);
    return static_cast<uint64_t>(law == Law::kUniform ? unit * all : std::pow(all + 1, unit) - 1);
  };
  Batches batches(count);
  for (auto& ids : batches) {
    while (ids.size() < batch) {
      while (ids.size() < batch) ids.push_back(draw());
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    }
    std::shuffle(ids.begin(), ids.end(), random);
  }
  return batches;
}

void fill(RowTable& table, int64_t rows, size_t batch, const std::vector<float>& gradients) {
  std::vector<uint64_t> ids;
  for (int64_t begin = 0; begin < rows; begin += static_cast<int64_t>(batch)) {
    ids.clear();
    for (int64_t id = begin; id < std::min(rows, begin + static_cast<int64_t>(batch)); ++id) {
      ids.push_back(static_cast<uint64_t>(id));
    }
    table.push(ids, std::span(gradients).first(ids.size() * kWidth), 1, 1);
  }
}

// Medians over rounds in which `work` handles every batch once.
struct Speed {
  double rows_per_s = 0;
  double cpu_ns_per_row = 0;
};
Speed speed_of(const Options& options, const Batches& batches, const auto& work) {
  const auto rows = static_cast<double>(batches.size() * options.batch);
  std::vector<double> rates, costs;
  for (int64_t round = 0; round < options.rounds; ++round) {
    const auto start = Clock::now();
    const double cpu = cpu_seconds();
    for (const auto& ids : batches) work(ids);
    rates.push_back(rows / seconds_since(start));
    costs.push_back((cpu_seconds() - cpu) * 1e9 / rows);
  }
  return {median_of(rates), median_of(costs)};
}

// Bytes a second of writing and reading a table's file, which stays in the page cache.
nlohmann::json through_file(const RowTable& table, const std::string& path,
                            const std::shared_ptr<TableThreads>& threads) {
  auto start = Clock::now();
  cohort::ps::write_table_file(table, path);
  const double writing = seconds_since(start);
  start = Clock::now();
  RowTable copy(table.options(), nullptr, threads);
  cohort::ps::load_table_file(path, copy, [](uint64_t) { return true; });
  const double loading = seconds_since(start);
  const auto bytes = static_cast<double>(fs::file_size(path));
  fs::remove(path);
  return {{"bytes", bytes},
          {"write_bytes_per_s", bytes / writing},
          {"load_bytes_per_s", bytes / loading},
          {"loaded_rows_per_s", static_cast<double>(copy.statistics().rows) / loading}};
}

nlohmann::json in_memory(const Options& options, int64_t rows) {
  const auto gradients = random_gradients(options.batch * kWidth);
  const auto batches = random_batches(Law::kUniform, rows, options.batch, 200);
  std::vector<float> weights(options.batch * kWidth);
  const int64_t before = resident_bytes();
  const auto threads = std::make_shared<TableThreads>(options.table_threads);
  // No row is as old as that: what an eviction costs is the pass over all rows.
  RowTable table(
      {.name = "bench", .width = kWidth, .eviction = {.time_to_live_s = int64_t{1} << 40}}, nullptr,
      threads);
  const auto start = Clock::now();
  fill(table, rows, options.batch, gradients);
  const double filling = seconds_since(start);
  const auto statistics = table.statistics();
  const double resident = static_cast<double>(resident_bytes() - before);
  const Speed pulled = speed_of(options, batches, [&](const auto& ids) {
    table.pull(ids, weights, RowTable::Unknown::kZeros);
  });
  uint32_t now = 2;
  const Speed pushed =
      speed_of(options, batches, [&](const auto& ids) { table.push(ids, gradients, 2, now++); });
  std::vector<double> passes;
  for (int64_t round = 0; round < options.rounds; ++round) {
    const auto began = Clock::now();
    table.evict(now);
    passes.push_back(static_cast<double>(rows) / seconds_since(began));
  }
  nlohmann::json result{{"rows", statistics.rows},
                        {"created_per_s", static_cast<double>(rows) / filling},
                        {"pulled_per_s", pulled.rows_per_s},
                        {"pulled_cpu_ns_per_row", pulled.cpu_ns_per_row},
                        {"pushed_per_s", pushed.rows_per_s},
                        {"pushed_cpu_ns_per_row", pushed.cpu_ns_per_row},
                        {"evict_pass_rows_per_s", median_of(passes)},
                        {"bytes_per_row", statistics.bytes_per_row()},
                        {"resident_bytes_per_row", resident / static_cast<double>(rows)}};
  if (!options.folder.empty())
    result["file"] = through_file(table, options.folder + "/table", threads);
  return result;
}

// A table of four times its memory cap.
nlohmann::json spilled(const Options& options) {
  TableOptions capped{.name = "bench", .width = kWidth, .at_cap = cohort::ps::AtCap::kSpill};
  capped.memory_cap_bytes = options.cold_rows / 4 * cohort::ps::row_bytes(capped);
  const std::string folder = options.folder + "/cold";
  fs::remove_all(folder);
  const auto gradients = random_gradients(options.batch * kWidth);
  const int64_t before = resident_bytes();
  RowTable table(capped,
                 std::make_unique<SpillStore>(
                     folder, SpillStore::Options{.width = kWidth,
                                                 .state_width = 1,
                                                 .memory_bytes = capped.memory_cap_bytes /
                                                                 2}),  // As a server's.
                 std::make_shared<TableThreads>(options.table_threads));
  auto start = Clock::now();
  fill(table, options.cold_rows, options.batch, gradients);
  const double filling = seconds_since(start);
  nlohmann::json result{{"rows", options.cold_rows},
                        {"rows_in_memory", table.statistics().rows},
                        {"created_per_s", static_cast<double>(options.cold_rows) / filling}};
  Options once = options;
  once.rounds = 1;
  std::vector<float> weights(options.batch * kWidth);
  uint32_t now = 2;
  for (const auto& [law, name] : {std::pair(Law::kUniform, "uniform"), {Law::kZipf, "zipf"}}) {
    const auto batches = random_batches(law, options.cold_rows, options.batch, 100);
    const auto first = table.statistics();
    const double pushed = speed_of(once, batches, [&](const auto& ids) {
                            table.push(ids, gradients, 2, now++);
                          }).rows_per_s;
    const auto moved = table.statistics().promoted - first.promoted;
    const auto others = random_batches(law, options.cold_rows, options.batch, 100);
    const double pulled = speed_of(once, others, [&](const auto& ids) {
                            table.pull(ids, weights, RowTable::Unknown::kZeros);
                          }).rows_per_s;
    result[name] = {{"pushed_per_s", pushed},
                    {"promoted_share", static_cast<double>(moved) /
                                           static_cast<double>(batches.size() * options.batch)},
                    {"pulled_per_s", pulled}};
  }
  start = Clock::now();
  fs::remove_all(folder + ".checkpoint");
  table.spill_store()->checkpoint(folder + ".checkpoint");
  result["checkpoint_s"] = seconds_since(start);
  result["resident_bytes"] = resident_bytes() - before;
  result["memory_cap_bytes"] = capped.memory_cap_bytes;
  fs::remove_all(folder + ".checkpoint");
  return result;
}

int run(const Options& options) {
  nlohmann::json result{{"bench", "row_table"},
                        {"width", kWidth},
                        {"rule", "rowwise_adagrad"},
                        {"table_threads", options.table_threads},
                        {"batch", options.batch}};
  for (const int64_t rows : options.rows) result["in_memory"].push_back(in_memory(options, rows));
  if (!options.folder.empty() && options.cold_rows > 0) result["spilled"] = spilled(options);
  std::printf("%s\n", result.dump().c_str());
  return cohort::kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("row_table", [&] {
    CLI::App app("What an embedding table does by itself");
    Options options;
    app.add_option("--rows", options.rows, "Rows of tables in memory")->capture_default_str();
    app.add_option("--cold-rows", options.cold_rows,
                   "Rows of the table of four times its memory; 0: none")
        ->capture_default_str();
    app.add_option("--folder", options.folder,
                   "Where files are written; without it neither files nor spilling are measured");
    app.add_option("--batch", options.batch, "Ids of a batch")->capture_default_str();
    app.add_option("--rounds", options.rounds, "Rounds, of which the median counts")
        ->capture_default_str();
    app.add_option("--table-threads", options.table_threads, "Threads that share the tables' rows")
        ->capture_default_str()
        ->check(CLI::Range(1, cohort::ps::TableThreads::kMost));
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
