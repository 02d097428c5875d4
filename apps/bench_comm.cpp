// SPDX-License-Identifier: Apache-2.0
#include "apps/bench_comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cohort/base/console.h"
#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/shared_tensor.h"
#include "cohort/train/progress.h"

#include "bench/median.h"

namespace cohort::apps {
namespace {

using comm::ProcessGroup;

constexpr const char* kRegistered = "-registered";

struct Result {
  std::string backend;
  bool registered = false;  // tensors in memory that the ranks share
  int64_t bytes = 0;
  std::vector<double> seconds;  // of one operation, by round
  double cpu_seconds = 0;       // of one operation, of all ranks together
};

// One operation on `bytes` of float32, and its bus bandwidth's factor as nccl-tests has it: what
// crosses the slowest link, by the bytes of the larger of input and output.
struct Operation {
  std::function<void(const ProcessGroup&, const at::Tensor&, const at::Tensor&)> call;
  std::function<double(double ranks)> bus_factor;
};

const std::map<std::string, Operation>& operations() {
  const auto share = [](double ranks) { return (ranks - 1) / ranks; };
  const auto part_of = [](const ProcessGroup& group, const at::Tensor& whole) {
    return whole.narrow(0, 0, whole.numel() / group.size());
  };
  static const std::map<std::string, Operation> all{
      {"all_reduce",
       {[](auto& group, auto& x, auto&) { group.all_reduce(x); },
        [share](double ranks) { return 2 * share(ranks); }}},
      {"all_gather",
       {[part_of](auto& group, auto& x, auto& y) { group.all_gather_into(y, part_of(group, x)); },
        share}},
      {"reduce_scatter",
       {[part_of](auto& group, auto& x, auto& y) { group.reduce_scatter(part_of(group, y), x); },
        share}},
      {"all_to_all", {[](auto& group, auto& x, auto& y) { group.all_to_all(y, x); }, share}},
      {"broadcast",
       {[](auto& group, auto& x, auto&) { group.broadcast(x); }, [](double) { return 1.0; }}},
  };
  return all;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// So that a round takes a while and a small size many calls.
int calls_for(int64_t bytes, int64_t round_bytes) {
  return static_cast<int>(std::clamp<int64_t>(round_bytes / bytes, 4, 2000));
}

void measure(const ProcessGroup& group, const Operation& operation, int64_t round_bytes,
             Result& result) {
  const int64_t numel = result.bytes / 4 / group.size() * group.size();
  const auto make = [&] {
    return result.registered ? comm::empty_shared(group, numel, at::kFloat) : at::empty({numel});
  };
  const at::Tensor x = make().fill_(1), y = make();
  const int calls = calls_for(result.bytes, round_bytes);
  // y's pages, too, are there before the time counts.
  y.copy_(x);
  for (int i = 0; i < std::max(calls / 10, 1); ++i) operation.call(group, x, y);
  x.zero_();  // what is added up stays finite
  group.barrier("round");
  const double cpu = cpu_seconds();
  const double wall = wall_seconds();
  for (int i = 0; i < calls; ++i) operation.call(group, x, y);
  result.seconds.push_back((wall_seconds() - wall) / calls);
  const at::Tensor used = at::tensor({(cpu_seconds() - cpu) / calls}, at::kDouble);
  result.cpu_seconds += group.all_reduce(used).item<double>();
}

struct Form {
  bool json = false;
  int name_width = 14;
};

void print_head(const std::string& title, const Form& form, Console& console) {
  if (form.json) return;
  console.print("# %s\n%-*s %12s %12s %12s %12s %12s %12s %12s\n", title.c_str(), form.name_width,
                "backend", "bytes", "us", "least", "most", "algbw GB/s", "busbw GB/s",
                "CPU us, all");
}

void print(const Result& result, double bus_factor, const Form& form, Console& console) {
  const double seconds = bench::median_of(result.seconds);
  const auto [least, most] = std::ranges::minmax_element(result.seconds);
  const double rate = static_cast<double>(result.bytes) / seconds * 1e-9;
  const double cpu_us = result.cpu_seconds / static_cast<double>(result.seconds.size()) * 1e6;
  if (form.json) {
    const nlohmann::ordered_json line{{"backend", result.backend},
                                      {"bytes", result.bytes},
                                      {"us", seconds * 1e6},
                                      {"least_us", *least * 1e6},
                                      {"most_us", *most * 1e6},
                                      {"algbw_gb_per_s", rate},
                                      {"busbw_gb_per_s", rate * bus_factor},
                                      {"cpu_us", cpu_us}};
    return console.print("%s\n", line.dump().c_str());
  }
  console.print("%-*s %12lld %12.1f %12.1f %12.1f %12.3f %12.3f %12.1f\n", form.name_width,
                result.backend.c_str(), static_cast<long long>(result.bytes), seconds * 1e6,
                *least * 1e6, *most * 1e6, rate, rate * bus_factor, cpu_us);
}

}  // namespace

void BenchComm::add_to(CLI::App& app) {
  std::vector<std::string> names;
  for (const auto& [name, operation] : operations()) names.push_back(name);
  app.add_option("--op", operation_, "Collective to measure, on float32")
      ->capture_default_str()
      ->check(cli::one_of(names));
  app.add_option("--backends", backends_,
                 "Backends to measure in turns (default: that of --dist-backend)")
      ->type_name("NAME");
  app.add_option("--min-bytes", min_bytes_, "Smallest size")
      ->capture_default_str()
      ->check(cli::above_zero());
  app.add_option("--max-bytes", max_bytes_, "Largest size")
      ->capture_default_str()
      ->check(cli::above_zero());
  app.add_option("--step-factor", factor_, "Factor from one size to the next")
      ->capture_default_str()
      ->check(CLI::Range(2, 1024));
  app.add_option("--rounds", rounds_, "Number of rounds; the median is reported")
      ->capture_default_str()
      ->check(cli::above_zero());
  app.add_flag("--registered", registered_,
               "Also measure with tensors in memory that the ranks of a host share, as gradient "
               "buckets are, where the backend has such memory");
  app.add_option(
         "--round-bytes", round_bytes_,
         "Bytes that the calls of a round send together, which sets their number, 4 to 2000")
      ->capture_default_str()
      ->check(cli::above_zero());
  app.add_flag("--copy", copy_, "Also measure a plain copy of each size, on all ranks at once");
  app.add_flag("--json", json_, "Print a line of JSON for each backend and size");
}

std::vector<int64_t> BenchComm::sizes(int num_ranks) const {
  if (min_bytes_ > max_bytes_) {
    throw ConfigError("--min-bytes " + std::to_string(min_bytes_) +
                      ": expected at most --max-bytes " + std::to_string(max_bytes_));
  }
  const int64_t least = 4 * int64_t{num_ranks};
  if (max_bytes_ < least) {
    throw ConfigError("--max-bytes " + std::to_string(max_bytes_) + ": expected at least " +
                      std::to_string(least) + ", a float32 number for each of " +
                      cli::counted(num_ranks, "rank"));
  }
  std::vector<int64_t> found{std::max(min_bytes_, least)};
  while (found.back() <= max_bytes_ / factor_) found.push_back(found.back() * factor_);
  return found;
}

void BenchComm::run(const ProcessGroup& group) const {
  const std::vector<int64_t> all_sizes = sizes(group.size());
  const Operation& operation = operations().at(operation_);
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<ProcessGroup> groups;
  for (const std::string& backend : backends_)
    groups.push_back(group.subgroup(ranks, backend, {.backend = backend}));
  if (groups.empty()) groups.push_back(group);
  // Agreed: of `hierarchical` some hosts may have such memory, and a rank alone on one does not.
  std::vector<bool> shares;
  for (const ProcessGroup& one : groups)
    shares.push_back(registered_ && one.all_reduce_sum(comm::shares_tensors(one) ? 1 : 0) > 0);
  const Operation copy{.call = [](auto&, auto& x, auto& y) { at::Tensor(y).copy_(x); },
                       .bus_factor = [](double) { return 1.0; }};
  Form form{.json = json_};
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string longest = groups[i].backend() + (shares[i] ? kRegistered : "");
    form.name_width = std::max(form.name_width, static_cast<int>(longest.size()));
  }
  Console console(group.rank());
  print_head(operation_ + " of float32, " + cli::counted(group.size(), "rank"), form, console);
  train::Progress progress;
  const bool shows = group.rank() == 0 && train::is_terminal(STDERR_FILENO);
  int64_t done = 0;
  for (const int64_t bytes : all_sizes) {
    std::vector<Result> results;
    std::vector<ProcessGroup> by_result;
    for (size_t i = 0; i < groups.size(); ++i) {
      const ProcessGroup& one = groups[i];
      results.push_back({.backend = one.backend(), .bytes = bytes, .seconds = {}});
      by_result.push_back(one);
      if (!shares[i]) continue;
      results.push_back({.backend = one.backend() + kRegistered,
                         .registered = true,
                         .bytes = bytes,
                         .seconds = {}});
      by_result.push_back(one);
    }
    Result plain{.backend = "copy", .bytes = bytes, .seconds = {}};
    for (int round = 0; round < rounds_; ++round) {
      for (size_t i = 0; i < results.size(); ++i)
        measure(by_result[i], operation, round_bytes_, results[i]);
      if (copy_) measure(group, copy, round_bytes_, plain);
      if (!shows) continue;
      progress.update({.phase = std::to_string(bytes) + " bytes",
                       .step = ++done,
                       .num_steps = std::ssize(all_sizes) * rounds_});
    }
    if (bytes == all_sizes.back()) {
      progress.finish();
    } else {
      progress.clear();
    }
    for (const Result& result : results)
      print(result, operation.bus_factor(group.size()), form, console);
    if (copy_) print(plain, 1, form, console);
  }
}

}  // namespace cohort::apps
