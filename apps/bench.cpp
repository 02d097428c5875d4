// SPDX-License-Identifier: Apache-2.0
// `cohort bench comm`: collectives, in bench_comm.h. `cohort bench step`: a training step, in bench_step.h. `cohort bench decode`: a search, in bench_decode.h. `cohort bench ddp`: how much of the gradients' way DistributedDataParallel hides behind backward.
//
//   cohort run --nproc-per-node 2 -- cohort bench ddp --layers 8 --width 1024 --hook bf16
//
// Rank 0 prints one JSON line: step time with and without communication (no_sync) and their
// difference, the exposed communication; the share of the all-reduce that backward hid, as the
// engine's own clock saw it; bucket sizes.
#include <CLI/CLI.hpp>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "cohort/base/console.h"
#include "cohort/base/program.h"
#include "cohort/cli/group_flags.h"
#include "cohort/cli/parse.h"
#include "cohort/parallel/comm_hooks/all_reduce.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/comm_hooks/power_sgd.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "apps/bench_comm.h"
#ifdef COHORT_HAS_NMT
#include "apps/bench_decode.h"
#include "apps/bench_step.h"
#endif
#include "bench/median.h"

namespace {

using Clock = std::chrono::steady_clock;
using cohort::bench::median_of;
using cohort::comm::ProcessGroup;
using Ddp = cohort::parallel::DistributedDataParallel<torch::nn::Sequential>;

struct Options {
  int64_t layers = 8;
  int64_t width = 1024;
  int64_t batch = 64;
  int steps = 20;
  int warmup = 5;
  std::string hook = "none";
  cohort::parallel::DistributedDataParallelOptions ddp;
};

cohort::parallel::CommHook hook_named(const std::string& name) {
  if (name == "all_reduce") return cohort::parallel::all_reduce_hook();
  if (name == "noop") return cohort::parallel::noop_hook();
  if (name == "fp16") return cohort::parallel::fp16_compress_hook();
  if (name == "bf16") return cohort::parallel::bf16_compress_hook();
  return cohort::parallel::power_sgd_hook(std::make_shared<cohort::parallel::PowerSgdState>(
      cohort::parallel::PowerSgdOptions{.start_power_sgd_iter = 2}));
}

// Seconds of one forward and backward, with the averaging or without.
double step_time(const ProcessGroup& group, Ddp& ddp, const at::Tensor& input, bool averaging) {
  for (auto& parameter : ddp.module()->parameters()) parameter.mutable_grad().reset();
  std::optional<cohort::parallel::NoSync> local;
  if (!averaging) local.emplace(ddp);
  group.barrier("step");
  const auto start = Clock::now();
  ddp(input).pow(2).mean().backward();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

nlohmann::ordered_json bench_ddp(const Options& options, const ProcessGroup& group) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < options.layers; ++i) {
    model->push_back(torch::nn::Linear(options.width, options.width));
    model->push_back(torch::nn::Functional(at::relu));
  }
  Ddp ddp(model, group, options.ddp);
  if (options.hook != "none") ddp.register_comm_hook(hook_named(options.hook), options.hook);
  const at::Tensor input = at::randn({options.batch, options.width});
  // Taken in turns: what disturbs the machine disturbs both.
  std::vector<double> with;
  std::vector<double> without;
  for (int step = 0; step < options.warmup + options.steps; ++step) {
    const double together = step_time(group, ddp, input, /*averaging=*/true);
    const double alone = step_time(group, ddp, input, /*averaging=*/false);
    if (step < options.warmup) continue;
    with.push_back(together);
    without.push_back(alone);
  }
  const cohort::parallel::DdpLoggingData data = ddp.logging_data();
  const auto seconds = [](int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; };
  const double travel = seconds(data.backward_comm_time);
  const double hidden = seconds(data.backward_compute_comm_overlap_time);
  return {{"bench", "ddp"},
          {"world_size", group.size()},
          {"hook", options.hook},
          {"parameter_bytes", data.total_parameter_size_bytes},
          {"bucket_bytes", data.bucket_sizes_bytes},
          {"has_rebuilt_buckets", data.has_rebuilt_buckets},
          {"step_s", median_of(with)},
          {"step_without_communication_s", median_of(without)},
          {"exposed_communication_s", median_of(with) - median_of(without)},
          {"forward_s", seconds(data.forward_compute_time)},
          {"backward_s", seconds(data.backward_compute_time)},
          {"communication_s", travel},
          {"overlap_share", travel > 0 ? hidden / travel : 0}};
}

int run(int argc, char** argv) {
  Options options;
  options.ddp.gradient_as_bucket_view = true;
  options.ddp.logging_sample_rate = 1;
  CLI::App app("Measures this machine and network", "cohort bench");
  app.require_subcommand(1);
  CLI::App& ddp = *app.add_subcommand("ddp", "Exposed communication of DistributedDataParallel");
  const auto number = [&](const char* name, auto& value, const char* text) {
    ddp.add_option(name, value, text)->capture_default_str()->check(cohort::cli::above_zero());
  };
  number("--layers", options.layers, "Number of square linear layers");
  number("--width", options.width, "Width of each layer");
  number("--batch", options.batch, "Rows per rank");
  number("--steps", options.steps, "Measured steps");
  ddp.add_option("--warmup", options.warmup, "Warm-up steps, which are not measured")
      ->capture_default_str()
      ->check(cohort::cli::zero_or_more());
  number("--bucket-cap-mb", options.ddp.bucket_cap_mb, "Largest size of a bucket, MiB");
  number("--first-bucket-mb", options.ddp.first_bucket_mb, "Size of the first bucket, MiB");
  ddp.add_option("--hook", options.hook, "Communication hook that averages a bucket")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "all_reduce", "fp16", "bf16", "power_sgd", "noop"}));
  ddp.add_flag("--rebuild-buckets", options.ddp.rebuild_buckets,
               "Rebuild buckets in the order in which gradients arrive");
  ddp.add_flag("--find-unused-parameters", options.ddp.find_unused_parameters,
               "Look for unused parameters in each step");
  ddp.add_flag("--static-graph", options.ddp.static_graph, "Assume that the graph never changes");
  CLI::App& comm = *app.add_subcommand("comm", "Latency and bandwidth of collectives");
  cohort::apps::BenchComm bench_comm;
  bench_comm.add_to(comm);
#ifdef COHORT_HAS_NMT
  cohort::apps::BenchStep bench_step(app);
  cohort::apps::BenchDecode bench_decode(app);
#endif
  cohort::cli::GroupFlags flags;
  for (CLI::App* command : {&ddp, &comm}) flags.add_to(*command);
  if (const auto ended =
          cohort::cli::parse(app, argc, argv, "cohort bench --help lists what there is"))
    return *ended;
#ifdef COHORT_HAS_NMT
  if (bench_step.parsed()) return bench_step.run();
  if (bench_decode.parsed()) return bench_decode.run();
#endif
  const auto group = flags.connect();
  cohort::cli::check_same_flags(group, comm.parsed() ? comm : ddp);
  if (comm.parsed()) {
    bench_comm.run(group);
    group.close();
    return cohort::kExitOk;
  }
  const nlohmann::ordered_json result = bench_ddp(options, group);
  group.close();
  cohort::Console(group.rank()).print("%s\n", result.dump().c_str());
  return cohort::kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort bench", [&] { return run(argc, argv); });
}
