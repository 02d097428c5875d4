// SPDX-License-Identifier: Apache-2.0
// Speed of the search with the base translator and random weights, on one thread.
//
//   build/release/bin/nmt_decode --beam-size 4 --precision bfloat16
//
// Every output is forced to --output-tokens, so that all searches do the same work whatever their
// weights. Prints one JSON line: generated tokens per second, the end marks not counted.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <torch/types.h>
#include <vector>

#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/nmt/search.h"

#include "bench/median.h"

namespace {

using cohort::bench::median_of;

struct Options {
  std::string precision = "auto";
  int64_t beam_size = 1;
  int64_t batch = 32;
  int64_t source_tokens = 25;
  int64_t output_tokens = 30;
  int64_t runs = 5;
  uint64_t seed = 1;
};

int run(const Options& options) {
  using Clock = std::chrono::steady_clock;
  using namespace cohort::nmt;
  at::set_num_threads(1);
  const Precision precision = parse_precision(options.precision);
  check_precision(precision, /*on_cpu=*/true);
  const bool int8 = precision == Precision::kInt8;
  Transformer model(preset("base"), int8 ? Precision::kFloat32 : precision);
  model->initialise(options.seed);
  const int64_t params = count_parameters(*model);
  if (int8) model = quantize(model);
  at::Tensor source = at::randint(4, model->options().dim_vocab_source,
                                  {options.batch, options.source_tokens}, at::kLong);
  source.select(1, options.source_tokens - 1).fill_(3);  // the end mark
  const at::Tensor lengths = at::full({options.batch}, options.source_tokens, at::kLong);
  const SearchOptions search_options{.beam_size = options.beam_size,
                                     .max_length = options.output_tokens,
                                     .min_length = options.output_tokens,
                                     .scores = false};
  std::vector<double> rates;
  for (int64_t i = 0; i <= options.runs; ++i) {
    const auto start = Clock::now();
    const auto results = search(model, source, lengths, search_options);
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    double tokens = 0;
    for (const auto& hypotheses : results)
      tokens += static_cast<double>(hypotheses.front().tokens.size());
    TORCH_CHECK(tokens == static_cast<double>(options.batch * options.output_tokens),
                "an output was not forced to its length");
    if (i == 0) continue;  // It warms up.
    rates.push_back(tokens / elapsed);
  }
  const nlohmann::ordered_json line = {{"bench", "nmt_decode"},
                                       {"tokens_per_s", median_of(rates)},
                                       {"tokens_per_s_each", rates},
                                       {"precision", to_string(precision)},
                                       {"beam_size", options.beam_size},
                                       {"batch", options.batch},
                                       {"source_tokens", options.source_tokens},
                                       {"output_tokens", options.output_tokens},
                                       {"params", params}};
  std::printf("%s\n", line.dump().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Speed of the search with the base translator");
  app.add_option("--precision", options.precision, "auto, bfloat16, float32 or int8")
      ->capture_default_str();
  const auto add = [&](const char* name, int64_t& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->check(CLI::Range(1, 10000));
  };
  add("--beam-size", options.beam_size, "Translations followed at a time; 1 is greedy search");
  add("--batch", options.batch, "Sentences at a time");
  add("--source-tokens", options.source_tokens, "Of each sentence, the end mark included");
  add("--output-tokens", options.output_tokens, "Of each translation, without its end mark");
  add("--runs", options.runs, "Measured searches; one more warms up");
  app.add_option("--seed", options.seed, "Of the parameters")->capture_default_str();
  return cohort::run_program("nmt_decode", [&] {
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
