// SPDX-License-Identifier: Apache-2.0
// `cohort doctor`: what this machine is and how fast, and which strategy a model needs on it.
//
// What is measured between processes takes two of them: the program runs itself twice, and the
// first of the two says all.
#include <ATen/Version.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/version.h>

#include "cohort/base/error.h"
#include "cohort/base/machine.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/accelerator.h"
#include "cohort/comm/backend.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/spawn.h"
#include "cohort/nmt/product_rates.h"
#include "cohort/parallel/strategy_advice.h"

#include "apps/doctor/measure.h"
#include "apps/doctor/model_size.h"

namespace {

using cohort::ConfigError;
using cohort::Machine;
using cohort::cli::counted;
using cohort::cli::ModelSize;
using cohort::parallel::readable_bytes;
using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

// What `cohort nmt train` keeps to save, bytes a parameter: the copy that it writes while training
// continues, of the weights and both moments, and the best weights until they are in best/. It also
// gathers the whole model to validate.
constexpr double kSavedBytes = 12 + 4;

struct DoctorFlags {
  bool json = false;
  bool no_measure = false;
  std::string model;
  int ranks = 0;
  int nproc_per_node = 0;
};

// ---- the facts

Json describe(const Machine& machine) {
  Json gpus = Json::array();
  for (const cohort::GpuUse& gpu : machine.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"memory_bytes", gpu.memory_bytes},
                    {"memory_used_bytes", gpu.memory_used_bytes},
                    {"busy_percent", gpu.busy_percent}});
  }
  return {{"host", machine.host},
          {"cpu", machine.cpu},
          {"cores", machine.cores},
          {"core_limit", machine.core_limit},
          {"memory_bytes", machine.memory_bytes},
          {"instructions", machine.instructions},
          {"gpus", gpus}};
}

Json versions(bool has_cuda_device) {
  Json backends = {
      "gloo", "shm",
      "hierarchical"};  // Inside libtorch, which does not say which Gloo it is; and ours.
  for (const std::string built_apart : {"mpi", "nccl"}) {
    if (built_apart == "nccl" && !has_cuda_device) continue;
    try {
      cohort::comm::find_backend(built_apart);
      backends.push_back(built_apart);
    } catch (const ConfigError&) {  // It is not installed, or cannot be loaded here.
    }
  }
  std::string products = at::get_mkldnn_version();
  std::replace(products.begin(), products.end(), '\n', ' ');
  return {{"cohort", COHORT_VERSION},    {"libtorch", TORCH_VERSION},
          {"products", products},        {"kernels", at::get_cpu_capability()},
          {"compiler", COHORT_COMPILER}, {"backends", backends}};
}

// Whether libtorch can compute on CUDA devices here, and what is missing if not; Cohort's kernels.
Json cuda() {
  const std::string kernels = cohort::comm::cuda_kernels_file();
  Json facts = {{"devices", 0}, {"kernels", kernels.empty() ? Json(nullptr) : Json(kernels)}};
  try {
    facts["devices"] = cohort::comm::init_cuda();
  } catch (const ConfigError& error) {
    facts["reason"] = error.what();
  }
  return facts;
}

Json products(int threads) {
  Json rates = {{"threads", threads}};
  const auto measured = [](int count) {
    return cohort::nmt::measure_products(count, /*columns=*/2048, milliseconds(600));
  };
  const auto one = measured(1), all = threads == 1 ? one : measured(threads);
  rates["float32"] = {{"one_thread_flop_per_s", one.float32_flop_per_s},
                      {"all_threads_flop_per_s", all.float32_flop_per_s}};
  rates["bfloat16"] = {{"one_thread_flop_per_s", one.bfloat16_flop_per_s},
                       {"all_threads_flop_per_s", all.bfloat16_flop_per_s}};
  return rates;
}

Json all_reduce(const cohort::comm::ProcessGroup& group) {
  const auto rate = cohort::cli::measure_all_reduce(group);
  return {{"ranks", group.size()},
          {"bytes", rate.bytes},
          {"bytes_per_s", rate.bytes_per_second},
          {"latency_s", rate.latency_s}};
}

Json advice(const DoctorFlags& flags, const ModelSize& model, const Machine& machine) {
  const int local = flags.nproc_per_node > 0 ? flags.nproc_per_node : flags.ranks;
  const auto advised = cohort::parallel::advise({.parameters = model.parameters,
                                                 .largest_unit = model.largest_unit,
                                                 .world_size = flags.ranks,
                                                 .local_world_size = local,
                                                 .host_memory_bytes = machine.memory_bytes,
                                                 .saved_bytes = kSavedBytes,
                                                 .gathers_whole = true});
  Json strategies = Json::array();
  for (const auto& each : advised.strategies) {
    strategies.push_back({{"strategy", each.strategy},
                          {"bytes_per_rank", each.bytes},
                          {"sent_per_step", each.sent},
                          {"fits", each.fits},
                          {"reason", each.reason}});
  }
  return {{"model", model.found_in},
          {"parameters", model.parameters},
          {"largest_unit", model.largest_unit},
          {"largest_unit_is_assumed", model.unit_is_assumed},
          {"ranks", flags.ranks},
          {"ranks_per_host", local},
          {"memory_bytes_per_rank", machine.memory_bytes / local},
          {"strategies", strategies},
          {"chosen", advised.chosen ? Json(*advised.chosen) : Json(nullptr)},
          {"tensor_parallel", advised.tensor_parallel},
          {"reason", advised.reason}};
}

// ---- the facts for a person

std::string number(double value, const char* format = "%.4g") {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string joined(const Json& words) {
  std::string text;
  for (const Json& word : words) text += (text.empty() ? "" : " ") + word.get<std::string>();
  return text;
}

void line(const std::string& name, const std::string& value) {
  std::printf("%-14s%s\n", name.c_str(), value.c_str());
}

void print_machine(const Machine& machine, const Json& facts) {
  line("host", machine.host);
  line("processor", machine.cpu);
  line("cores", std::to_string(machine.cores) +
                    (machine.core_limit < machine.cores
                         ? ", of which its cgroup grants " + number(machine.core_limit)
                         : ""));
  line("memory", readable_bytes(static_cast<double>(machine.memory_bytes)));
  line("instructions", joined(facts["machine"]["instructions"]));
  if (machine.gpus.empty()) line("GPUs", "none");
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    const cohort::GpuUse& gpu = machine.gpus[i];
    std::string text = gpu.name;
    if (std::isfinite(gpu.memory_bytes))
      text += ", " + readable_bytes(gpu.memory_bytes) + ", used " +
              readable_bytes(gpu.memory_used_bytes);
    if (std::isfinite(gpu.busy_percent)) text += ", " + number(gpu.busy_percent) + " % busy";
    line("GPU " + std::to_string(i), text);
  }
}

void print_versions(const Json& versions) {
  line("Cohort", versions["cohort"].get<std::string>() + ", compiled by " +
                     versions["compiler"].get<std::string>());
  line("libtorch", versions["libtorch"].get<std::string>() + ", kernels for " +
                       versions["kernels"].get<std::string>() + ", " +
                       versions["products"].get<std::string>());
  line("backends", joined(versions["backends"]));
}

void print_cuda(const Json& cuda) {
  line("accelerator", cuda.contains("reason")
                          ? cuda["reason"].get<std::string>()
                          : counted(cuda["devices"].get<int>(), "device") + " (--device cuda)");
  line("CUDA kernels", cuda["kernels"].is_null()
                           ? "none beside the programs: libtorch's operations take their place"
                           : cuda["kernels"].get<std::string>());
}

void print_measured(const Json& facts) {
  const Json& rates = facts["products"];
  for (const char* type : {"float32", "bfloat16"}) {
    const double one = rates[type]["one_thread_flop_per_s"],
                 all = rates[type]["all_threads_flop_per_s"];
    const int threads = rates["threads"];
    line(type,
         number(one / 1e9) + " GFLOP/s on one thread" +
             (threads > 1 ? ", " + number(all / 1e9) + " on " + std::to_string(threads) : ""));
  }
  const Json& sum = facts["all_reduce"];
  if (sum.contains("error")) return line("all-reduce", sum["error"].get<std::string>());
  line("all-reduce", number(sum["bytes_per_s"].get<double>() / 1e9) + " GB/s of " +
                         readable_bytes(sum["bytes"].get<double>()) + " between " +
                         std::to_string(sum["ranks"].get<int>()) + " processes, " +
                         number(sum["latency_s"].get<double>() * 1e6) + " us for 4 bytes");
}

void print_advice(const Json& advice) {
  const std::string model = advice["model"];
  std::printf("\n%s%s on %s, %d a host, each with %s, %.0f %% of it for state\n",
              counted(advice["parameters"].get<int64_t>(), "parameter").c_str(),
              model.empty() ? "" : (" (" + model + ")").c_str(),
              counted(advice["ranks"].get<int>(), "rank").c_str(),
              advice["ranks_per_host"].get<int>(),
              readable_bytes(advice["memory_bytes_per_rank"].get<double>()).c_str(),
              100 * cohort::parallel::kShareAtRest);
  std::printf("the largest unit has %lld of them%s\n\n", advice["largest_unit"].get<long long>(),
              advice["largest_unit_is_assumed"].get<bool>()
                  ? ", assuming a translator of 6 + 6 layers and vocabularies of 32,000 pieces"
                  : "");
  for (const Json& each : advice["strategies"]) {
    std::printf("%-7s  %-8s  %s\n", each["strategy"].get<std::string>().c_str(),
                each["fits"].get<bool>() ? "fits" : "too much",
                each["reason"].get<std::string>().c_str());
  }
  std::string chosen;
  if (!advice["chosen"].is_null()) {
    const int together = advice["tensor_parallel"];
    chosen = (together > 1 ? "--tensor-parallel " + std::to_string(together) + " " : "") +
             "--strategy " + advice["chosen"].get<std::string>() + ": ";
  }
  std::printf("\n%s%s\n", chosen.c_str(), advice["reason"].get<std::string>().c_str());
}

// ---- the program

// One of the two processes that `cohort doctor` starts; the second has nothing to say.
std::optional<Json> measure_between_processes() {
  const auto info = cohort::comm::rank_info_from_environment();
  try {
    cohort::comm::ProcessGroup group(
        info, {.rendezvous_timeout = milliseconds(20'000), .timeout = milliseconds(20'000)});
    Json measured = all_reduce(group);
    group.close();
    return info.rank == 0 ? std::optional(measured) : std::nullopt;
  } catch (const std::exception& error) {  // Part of the answer: the network is what is wrong.
    return info.rank == 0 ? std::optional(Json{{"error", cohort::one_line(error)}}) : std::nullopt;
  }
}

int report(const DoctorFlags& flags, const std::optional<ModelSize>& model,
           const std::optional<Json>& all_reduce_rate) {
  const Machine machine = cohort::this_machine();
  const Json accelerator = cuda();
  Json facts = {{"machine", describe(machine)},
                {"versions", versions(accelerator["devices"] > 0)},
                {"cuda", accelerator}};
  if (model) facts["advice"] = advice(flags, *model, machine);
  if (all_reduce_rate) {
    const double threads = std::min<double>(machine.cores, std::floor(machine.core_limit));
    facts["products"] = products(std::max(1, static_cast<int>(threads)));
    facts["all_reduce"] = *all_reduce_rate;
  }
  if (flags.json) {
    std::printf("%s\n", facts.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
    return cohort::kExitOk;
  }
  print_machine(machine, facts);
  print_versions(facts["versions"]);
  print_cuda(facts["cuda"]);
  if (all_reduce_rate) print_measured(facts);
  if (model) print_advice(facts["advice"]);
  return cohort::kExitOk;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Reports this machine's hardware and speed, and the strategy that a model needs on it",
      "cohort doctor");
  DoctorFlags flags;
  app.add_flag("--json", flags.json, "Print JSON");
  app.add_flag("--no-measure", flags.no_measure,
               "Skip the measurements of speed, which take seconds");
  auto* model_flag =
      app.add_option("--model", flags.model,
                     "Suggest a strategy to train this model with `cohort nmt train`: a run's or a "
                     "checkpoint's folder, or a number of parameters such as 93M")
          ->type_name(cohort::kFolder);
  auto* ranks = app.add_option("--ranks", flags.ranks, "Number of ranks (default: one per core)")
                    ->needs(model_flag)
                    ->check(CLI::Range(1, 1 << 20));
  app.add_option("--nproc-per-node", flags.nproc_per_node,
                 "Ranks on each host; all hosts are like this one (default: all ranks)")
      ->needs(ranks)
      ->check(CLI::Range(1, 1 << 20));
  if (const auto ended = cohort::cli::parse(app, argc, argv, "cohort doctor --help lists flags"))
    return *ended;
  std::optional<ModelSize> model;
  if (!flags.model.empty()) model = cohort::cli::size_of_model(flags.model);
  if (flags.ranks == 0) flags.ranks = static_cast<int>(cohort::launch::usable_cores().size());
  if (flags.nproc_per_node > 0 && flags.ranks % flags.nproc_per_node != 0) {
    throw ConfigError("--ranks " + std::to_string(flags.ranks) +
                      ": expected a multiple of --nproc-per-node " +
                      std::to_string(flags.nproc_per_node));
  }
  if (flags.no_measure) return report(flags, model, {});
  if (!cohort::launch::is_spawned()) return cohort::launch::spawn({.nproc_per_node = 2});
  const auto measured = measure_between_processes();
  return measured ? report(flags, model, measured) : cohort::kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort doctor", [&] { return run(argc, argv); });
}
