// SPDX-License-Identifier: Apache-2.0
#include "apps/bench_step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sys/resource.h>
#include <torch/types.h>

#include "cohort/base/console.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/shared_tensor.h"
#include "cohort/nmt/kernels/kernels.h"
#include "cohort/parallel/strategy.h"
#include "cohort/translate/precision.h"
#include "cohort/translate/updater.h"

#include "apps/step_batches.h"
#include "apps/step_recorder.h"
#include "bench/median.h"

namespace cohort::apps {
namespace {

using BySection = std::array<double, kNumSections>;
using StepClock = std::chrono::steady_clock;

struct SectionNames {
  const char* key;
  const char* text;
};
constexpr std::array<SectionNames, kNumSections> kSectionNames{{
    {"products_forward", "products, forward"},
    {"products_dx", "products, dX"},
    {"products_dw", "products, dW"},
    {"products_vocabulary", "products, vocabulary"},
    {"attention", "attention"},
    {"loss", "loss"},
    {"elementwise", "norms, dropout, casts, sums"},
    {"optimizer", "optimizer"},
    {"communication_exposed", "communication, exposed"},
    {"other", "other"},
}};
constexpr bool is_product(size_t section) {
  return section <= static_cast<size_t>(Section::kVocabulary);
}

double elapsed_since(StepClock::time_point start) {
  return std::chrono::duration<double>(StepClock::now() - start).count();
}

// Operands of a product, with its layouts; what they hold does not matter.
struct Operands {
  at::Tensor a, b, bias, out;

  explicit Operands(const Product& p) {
    const auto matrix = [&](int64_t rows, int64_t columns, bool transposed) {
      if (!transposed) return at::randn({rows, columns}).to(p.type);
      return at::randn({columns, rows}).to(p.type).t();
    };
    a = matrix(p.m, p.k, p.a_transposed);
    b = matrix(p.k, p.n, p.b_transposed);
    if (p.has_bias) bias = at::zeros({p.n}, p.type);
    // Gradients of weights are in the weights' type.
    out = at::zeros({p.m, p.n}, p.a_transposed ? at::kFloat : p.type);
  }
  void multiply() { nmt::kernels_for(a).product(a, b, {.bias_M = bias}, out); }
};

// Seconds of the products of `steps` one after another with nothing between them, all ranks at
// once, by section: of each the median of the rounds.
BySection bare_products(const comm::ProcessGroup& group, const std::vector<RecordedStep>& steps,
                        int rounds) {
  const at::NoGradGuard no_grad;
  std::map<Product, Operands> operands;
  for (const RecordedStep& step : steps)
    for (const Product& product : step.products) operands.try_emplace(product, product);
  std::array<std::vector<double>, kNumSections> found;
  for (int round = 0; round < rounds; ++round) {
    BySection sums{};
    group.barrier("bare products");
    for (const RecordedStep& step : steps) {
      for (const Product& product : step.products) {
        Operands& of_product = operands.at(product);
        const auto start = StepClock::now();
        of_product.multiply();
        sums[static_cast<size_t>(product.section)] += elapsed_since(start);
      }
    }
    for (size_t i = 0; i < kNumSections; ++i) found[i].push_back(sums[i]);
  }
  BySection seconds{};
  for (size_t i = 0; i < kNumSections; ++i) seconds[i] = bench::median_of(found[i]);
  return seconds;
}

// Bytes a second of a plain copy, reads and writes counted, of each rank while all copy.
double copied_bytes_per_second(const comm::ProcessGroup& group, int rounds) {
  const at::Tensor from = at::ones({int64_t{32} << 20}), to = at::zeros_like(from);
  std::vector<double> rates;
  for (int round = 0; round < rounds; ++round) {
    group.barrier("copy");
    const auto start = StepClock::now();
    to.copy_(from);
    rates.push_back(2 * static_cast<double>(from.nbytes()) / elapsed_since(start));
  }
  return bench::median_of(rates);
}

// Seconds of the steps' all_reduces, one after another, while nobody computes.
double bare_communication(const comm::ProcessGroup& group, const std::vector<RecordedStep>& steps,
                          int rounds) {
  // By place in the step and size: as buckets, the same in every step, and where backends read in
  // place.
  std::map<std::pair<size_t, int64_t>, at::Tensor> tensors;
  for (const RecordedStep& step : steps) {
    for (size_t i = 0; i < step.reduced_bytes.size(); ++i) {
      at::Tensor& tensor = tensors[{i, step.reduced_bytes[i]}];
      if (tensor.defined()) continue;
      const int64_t numel = std::max<int64_t>(step.reduced_bytes[i] / 4, 1);
      tensor = comm::empty_shared(group, numel, at::kFloat).zero_();
    }
  }
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    group.barrier("bare communication");
    const auto start = StepClock::now();
    for (const RecordedStep& step : steps)
      for (size_t i = 0; i < step.reduced_bytes.size(); ++i)
        group.all_reduce(tensors.at({i, step.reduced_bytes[i]}));
    seconds.push_back(elapsed_since(start));
  }
  return bench::median_of(seconds);
}

struct ProcessorUse {
  double user = 0, system = 0;
  double faults = 0, major_faults = 0;

  static ProcessorUse now() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return {seconds(usage.ru_utime), seconds(usage.ru_stime),
            static_cast<double>(usage.ru_minflt + usage.ru_majflt),
            static_cast<double>(usage.ru_majflt)};
  }
};

// What one rank knows, of a mean step; then of the mean over ranks.
struct StepProfile {
  double step = 0;  // by a clock around the update, not the sum of the sections
  BySection seconds{}, limit{}, flop{}, faults{};
  double communication = 0, bare_communication = 0, reduced_bytes = 0;
  double user = 0, system = 0, all_faults = 0, major_faults = 0;
  double tokens = 0, copy_rate = 0, attention_rate = 0;

  void average(const comm::ProcessGroup& group) {
    std::vector<double*> places{&step,   &communication, &bare_communication, &reduced_bytes,
                                &user,   &system,        &all_faults,         &major_faults,
                                &tokens, &copy_rate,     &attention_rate};
    for (BySection* each : {&seconds, &limit, &flop, &faults})
      for (double& value : *each) places.push_back(&value);
    at::Tensor values = at::empty({std::ssize(places)}, at::kDouble);
    auto* data = values.data_ptr<double>();
    for (size_t i = 0; i < places.size(); ++i) data[i] = *places[i];
    group.all_reduce(values);
    for (size_t i = 0; i < places.size(); ++i) *places[i] = data[i] / group.size();
  }
};

// Milliseconds, or none where there is no limit.
nlohmann::ordered_json section_json(const StepProfile& profile, size_t i) {
  nlohmann::ordered_json line{{"ms", profile.seconds[i] * 1e3},
                              {"share", profile.seconds[i] / profile.step},
                              {"page_faults", std::round(profile.faults[i])}};
  if (profile.limit[i] > 0) {
    line["limit_ms"] = profile.limit[i] * 1e3;
    line["share_of_limit"] = profile.seconds[i] > 0 ? profile.limit[i] / profile.seconds[i] : 0;
  }
  if (profile.flop[i] > 0 && profile.seconds[i] > 0) {
    line["gflop_per_s"] = profile.flop[i] / profile.seconds[i] * 1e-9;
    line["limit_gflop_per_s"] = profile.flop[i] / profile.limit[i] * 1e-9;
  }
  return line;
}

nlohmann::ordered_json profile_json(const StepProfile& profile) {
  nlohmann::ordered_json sections;
  double products = 0, limit = 0, flop = 0;
  for (size_t i = 0; i < kNumSections; ++i) {
    sections[kSectionNames[i].key] = section_json(profile, i);
    if (!is_product(i)) continue;
    products += profile.seconds[i];
    limit += profile.limit[i];
    flop += profile.flop[i];
  }
  const double exposed = profile.seconds[static_cast<size_t>(Section::kCommunication)];
  return {{"step_ms", profile.step * 1e3},
          {"tgt_tokens_per_s_and_rank", profile.tokens / profile.step},
          {"sections", sections},
          {"products",
           {{"ms", products * 1e3},
            {"share", products / profile.step},
            {"limit_ms", limit * 1e3},
            {"share_of_limit", limit / products},
            {"gflop_per_s", flop / products * 1e-9},
            {"limit_gflop_per_s", flop / limit * 1e-9}}},
          {"communication",
           {{"total_ms", profile.communication * 1e3},
            {"hidden_ms", (profile.communication - exposed) * 1e3},
            {"exposed_ms", exposed * 1e3},
            {"bare_ms", profile.bare_communication * 1e3},
            {"all_reduced_bytes", std::round(profile.reduced_bytes)}}},
          {"processor",
           {{"user_ms", profile.user * 1e3},
            {"sys_ms", profile.system * 1e3},
            {"page_faults", std::round(profile.all_faults)},
            {"major_page_faults", std::round(profile.major_faults)}}},
          {"copy_gb_per_s", profile.copy_rate * 1e-9},
          {"attention_limit_gflop_per_s", profile.attention_rate * 1e-9}};
}

std::string number_or_dash(const nlohmann::ordered_json& line, const char* key, const char* form,
                           double factor = 1) {
  if (!line.contains(key)) return "-";
  char text[32];
  std::snprintf(text, sizeof text, form, line[key].get<double>() * factor);
  return text;
}

void print_section(Console& console, const char* name, const nlohmann::ordered_json& line) {
  console.print("%-28s %10.1f %7.1f %10s %10s %9s %9s %9s\n", name, line["ms"].get<double>(),
                line["share"].get<double>() * 100, number_or_dash(line, "limit_ms", "%.1f").c_str(),
                number_or_dash(line, "share_of_limit", "%.0f", 100).c_str(),
                number_or_dash(line, "gflop_per_s", "%.1f").c_str(),
                number_or_dash(line, "limit_gflop_per_s", "%.1f").c_str(),
                number_or_dash(line, "page_faults", "%.0f").c_str());
}

void print_table(Console& console, const nlohmann::ordered_json& result) {
  console.print("# a training step: %lld parameters, %s, %s, %lld words a rank, mean of %s\n",
                static_cast<long long>(result["params"].get<int64_t>()),
                cli::counted(result["world_size"].get<int>(), "rank").c_str(),
                result["precision"].get<std::string>().c_str(),
                static_cast<long long>(result["mini_batch_words"].get<int64_t>()),
                cli::counted(result["steps"].get<int64_t>(), "step").c_str());
  console.print("%-28s %10s %7s %10s %10s %9s %9s %9s\n", "section", "ms", "% step", "limit ms",
                "% of limit", "GFLOP/s", "limit", "faults");
  for (const SectionNames& names : kSectionNames)
    print_section(console, names.text, result["sections"][names.key]);
  console.print("%-28s %10.1f %7.1f\n", "step", result["step_ms"].get<double>(), 100.0);
  print_section(console, "of which products", result["products"]);
  const auto& communication = result["communication"];
  const auto& processor = result["processor"];
  console.print(
      "communication: %.1f ms, of which hidden %.1f and exposed %.1f; %.1f alone, while nobody "
      "computes\n"
      "processor: %.1f ms in programs, %.1f in the kernel (sys); page faults: %.0f\n",
      communication["total_ms"].get<double>(), communication["hidden_ms"].get<double>(),
      communication["exposed_ms"].get<double>(), communication["bare_ms"].get<double>(),
      processor["user_ms"].get<double>(), processor["sys_ms"].get<double>(),
      processor["page_faults"].get<double>());
}

struct Measured {
  std::vector<RecordedStep> steps;
  StepProfile profile;  // of its sums: time, tokens and the processor
  double logits_bytes = 0, attention_flop = 0;
};

struct Asked {
  int64_t words, steps, warmup, vocabulary;
  int rounds;
  uint64_t seed;
};

// Makes the steps, all ranks together.
Measured take_steps(translate::Updater& updater, const nmt::Transformer& model,
                    const comm::ProcessGroup& group, const Asked& asked) {
  const auto batches = plan_batches({.words = asked.words, .seed = asked.seed});
  const auto size = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  const auto type = model->precision() == nmt::Precision::kBFloat16 ? at::kBFloat16 : at::kFloat;
  StepRecorder recorder;
  Measured found;
  for (int64_t step = 0; step < asked.warmup + asked.steps; ++step) {
    const size_t index = (static_cast<size_t>(step) * size + rank) % batches.size();
    const auto batch = make_batch(batches[index], asked.seed * 1000003 + index, asked.vocabulary);
    group.barrier("step");
    const ProcessorUse before = ProcessorUse::now();
    recorder.begin();
    const auto start = StepClock::now();
    updater.update({batch});
    const double elapsed = elapsed_since(start);
    RecordedStep recorded = recorder.end();
    const ProcessorUse after = ProcessorUse::now();
    if (step < asked.warmup) continue;
    found.profile.user += after.user - before.user;
    found.profile.system += after.system - before.system;
    found.profile.all_faults += after.faults - before.faults;
    found.profile.major_faults += after.major_faults - before.major_faults;
    found.profile.step += elapsed;
    found.profile.tokens += static_cast<double>(batch.num_target_tokens);
    found.logits_bytes += static_cast<double>(batch.num_target_tokens * asked.vocabulary) *
                          static_cast<double>(c10::elementSize(type));
    found.attention_flop += attention_flop(batches[index], model->options());
    found.steps.push_back(std::move(recorded));
  }
  return found;
}

// Measures the limits of the sums of the steps.
void set_limits(Measured& found, const nmt::Transformer& model, const comm::ProcessGroup& group,
                const Asked& asked) {
  StepProfile& profile = found.profile;
  profile.limit = bare_products(group, found.steps, asked.rounds);
  profile.bare_communication =
      group.size() > 1 ? bare_communication(group, found.steps, asked.rounds) : 0;
  profile.copy_rate = copied_bytes_per_second(group, 2 * asked.rounds + 1);
  profile.attention_rate = product_rate(group, at::kFloat, asked.words) / group.size();
  const auto at_copy_rate = [&](double bytes) { return bytes / profile.copy_rate; };
  const auto attention = static_cast<size_t>(Section::kAttention);
  profile.limit[attention] = found.attention_flop / profile.attention_rate;
  profile.flop[attention] = found.attention_flop;
  // The logits are read once, and their gradient is written.
  profile.limit[static_cast<size_t>(Section::kLoss)] = at_copy_rate(2 * found.logits_bytes);
  // Parameters, gradients and two moments are read; all but the gradients are written.
  profile.limit[static_cast<size_t>(Section::kOptimizer)] =
      at_copy_rate(7 * 4 * static_cast<double>(nmt::count_parameters(*model) * asked.steps));
}

// Adds up the sections of the steps, and makes all sums those of a mean step and rank.
StepProfile mean_step(Measured found, const comm::ProcessGroup& group) {
  StepProfile& profile = found.profile;
  for (const RecordedStep& step : found.steps) {
    for (size_t i = 0; i < kNumSections; ++i) {
      profile.seconds[i] += step.section_seconds[i];
      profile.faults[i] += static_cast<double>(step.section_faults[i]);
    }
    for (const Product& product : step.products)
      profile.flop[static_cast<size_t>(product.section)] += product.flop();
    profile.communication += step.communication_seconds;
    for (const int64_t bytes : step.reduced_bytes)
      profile.reduced_bytes += static_cast<double>(bytes);
  }
  const auto steps = static_cast<double>(found.steps.size());
  for (BySection* each : {&profile.seconds, &profile.limit, &profile.flop, &profile.faults})
    for (double& value : *each) value /= steps;
  for (double* each : {&profile.step, &profile.communication, &profile.bare_communication,
                       &profile.reduced_bytes, &profile.user, &profile.system, &profile.all_faults,
                       &profile.major_faults, &profile.tokens})
    *each /= steps;
  profile.average(group);
  return profile;
}

}  // namespace

BenchStep::BenchStep(CLI::App& bench)
    : command_(*bench.add_subcommand(
          "step", "Where the time of a training step of the translator goes, beside each limit")) {
  const auto number = [&](const char* name, auto& value, const char* text) {
    command_.add_option(name, value, text)->capture_default_str()->check(cli::above_zero());
  };
  command_.add_option("--preset", preset_, "Sizes of the model: tiny, small, base or big")
      ->capture_default_str();
  command_
      .add_option("--depth", depth_, "Layers of the encoder, and of the decoder (0: the preset's)")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1000}));
  command_.add_option("--vocabulary", vocabulary_, "Pieces on each side")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{5}, int64_t{1} << 24));
  command_.add_option("--precision", precision_, "Precision of matrix products")
      ->check(CLI::IsMember({"auto", "bfloat16", "float32"}))
      ->capture_default_str();
  number("--words", words_, "Target tokens per rank and step, padded");
  number("--steps", steps_, "Measured steps");
  command_.add_option("--warmup", warmup_, "Warm-up steps, which are not measured")
      ->capture_default_str()
      ->check(cli::zero_or_more());
  number("--rounds", rounds_, "Rounds of each limit, of which the median counts");
  command_.add_option("--seed", seed_, "Random seed of sentences, parameters and dropout")
      ->capture_default_str();
  command_.add_flag("--json", json_, "Print a line of JSON");
  flags_.add_to(command_);
}

int BenchStep::run() {
  nmt::TransformerOptions sizes = nmt::preset(preset_);
  sizes.dim_vocab_source = sizes.dim_vocab_target = vocabulary_;
  if (depth_ > 0) sizes.enc_depth = sizes.dec_depth = depth_;
  std::optional<nmt::Precision> asked;
  if (precision_ != "auto") asked = nmt::parse_precision(precision_);
  const comm::ProcessGroup group = flags_.connect();
  cli::check_same_flags(group, command_);
  const auto precision = translate::agreed_precision(asked, group);
  nmt::check_precision(precision, /*on_cpu=*/true);
  nmt::Transformer model(sizes, precision);
  model->initialise(seed_);
  translate::Updater updater(model, group, {.seed = seed_});
  const std::vector<int64_t> bucket_bytes =
      dynamic_cast<const parallel::GradientEngine&>(updater.model().engine())
          .logging_data()
          .bucket_sizes_bytes;
  const Asked steps{.words = words_,
                    .steps = steps_,
                    .warmup = warmup_,
                    .vocabulary = vocabulary_,
                    .rounds = rounds_,
                    .seed = seed_};
  Measured found = take_steps(updater, model, group, steps);
  set_limits(found, model, group, steps);
  const StepProfile profile = mean_step(std::move(found), group);
  nlohmann::ordered_json result{{"bench", "step"},
                                {"preset", preset_},
                                {"params", nmt::count_parameters(*model)},
                                {"world_size", group.size()},
                                {"backend", group.backend()},
                                {"precision", nmt::to_string(precision)},
                                {"mini_batch_words", words_},
                                {"steps", steps_},
                                {"bucket_bytes", bucket_bytes}};
  result.update(profile_json(profile));
  group.close();
  Console console(group.rank());
  if (json_) {
    console.print("%s\n", result.dump().c_str());
  } else {
    print_table(console, result);
  }
  return kExitOk;
}

}  // namespace cohort::apps
