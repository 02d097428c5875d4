// SPDX-License-Identifier: Apache-2.0
// What the trace and the comparison of calls cost a collective.
//
//   cohort run --nproc-per-node 2 -- build/release/bin/trace_cost
//
// Rank 0 prints one JSON line: nanoseconds of one record written to the page (in memory, in a
// mapped file), of an empty guarded call (two records), and per size of an all_reduce its
// microseconds without and with a comparison at every call. Medians of --repeats rounds.
#include <ATen/ops/ones.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <unistd.h>
#include <vector>

#include "cohort/base/program.h"
#include "cohort/base/trace_page.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/process_group.h"

#include "bench/median.h"

namespace {

using cohort::bench::median_of;
using Clock = std::chrono::steady_clock;

struct Options {
  int64_t repeats = 7;
  int64_t calls = 2000;
};

// Nanoseconds of one call.
double once(int64_t calls, const std::function<void()>& call) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() /
         static_cast<double>(calls);
}

double time_of(const Options& options, int64_t calls, const std::function<void()>& call) {
  std::vector<double> rounds;
  for (int64_t i = 0; i < options.repeats; ++i) rounds.push_back(once(calls, call));
  return median_of(rounds);
}

double page_write_ns(const Options& options, const std::string& file) {
  cohort::TracePage page(file);
  cohort::TraceRecord record;
  record.num_dims = 2;
  cohort::set_field(record.operation, "all_reduce(sum)");
  cohort::set_field(record.dtype, "float32");
  return time_of(options, 200'000, [&] {
    ++record.sequence;
    page.write(record);
  });
}

// Both ways in turn, so that a slow minute of the machine touches both.
nlohmann::json all_reduce_us(const Options& options, const cohort::comm::ProcessGroup& group,
                             const cohort::comm::ProcessGroup& comparing, int64_t num_elements) {
  at::Tensor x = at::ones({num_elements});
  const int64_t calls =
      std::max<int64_t>(5, std::min<int64_t>(options.calls, 20'000'000 / num_elements));
  std::vector<double> plain;
  std::vector<double> compared;
  for (int64_t i = 0; i < options.repeats; ++i) {
    plain.push_back(once(calls, [&] { group.all_reduce(x, cohort::comm::ReduceOp::kMax); }));
    compared.push_back(once(calls, [&] { comparing.all_reduce(x, cohort::comm::ReduceOp::kMax); }));
  }
  return {{"bytes", num_elements * 4},
          {"plain_us", median_of(plain) / 1000},
          {"compared_us", median_of(compared) / 1000},
          {"ratio", median_of(compared) / median_of(plain)}};
}

int run(const Options& options) {
  const auto group = cohort::init_process_group({.backend = "gloo"});
  const auto comparing = cohort::init_process_group(
      {.backend = "gloo", .check_collectives = cohort::comm::CheckCollectives::kAlways});
  nlohmann::json result{{"bench", "trace_cost"}, {"ranks", group.size()}};
  const auto file =
      std::filesystem::temp_directory_path() / ("cohort-trace-cost-" + std::to_string(getpid()));
  result["page_write_ns"] = page_write_ns(options, "");
  result["page_write_mapped_ns"] = page_write_ns(options, file);
  std::filesystem::remove(file);
  result["empty_guard_ns"] =
      time_of(options, 20'000, [&] { group.translate_errors("nothing", [] {}); });
  for (const int64_t num_elements : {1, 1 << 14, 1 << 20, 1 << 23}) {
    result["all_reduce"].push_back(all_reduce_us(options, group, comparing, num_elements));
  }
  comparing.close();
  group.close();
  if (group.rank() == 0) std::printf("%s\n", result.dump().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("trace_cost", [&] {
    CLI::App app("What the trace and the comparison of calls cost a collective");
    Options options;
    app.add_option("--repeats", options.repeats, "Rounds, of which the median counts")
        ->capture_default_str();
    app.add_option("--calls", options.calls, "Calls of a small all_reduce in a round")
        ->capture_default_str();
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
