// SPDX-License-Identifier: Apache-2.0
// Speed of the search with the base translator and random weights, on one thread, or on several that search at a time.
//
//   build/release/bin/nmt_decode --beam-size 4 --precision bfloat16
//
// Every output is forced to --output-tokens, so that all searches do the same work whatever their
// weights. Prints one JSON line: generated tokens per second, the end marks not counted. With --cpu-threads N also those of N
// searches at a time of one model, each on one thread, as `cohort nmt translate --cpu-threads N` has them, and beside how much that is the
// same for nothing but a step's products with the decoder's weights; all in turns.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
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
  int64_t threads = 1;
  int64_t candidates = 0;
  uint64_t seed = 1;
};

// Calls work() on so many threads at a time; returns the seconds until all have ended.
template <class Work>
double seconds_of(int64_t threads, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::jthread> running;
  for (int64_t i = 1; i < threads; ++i) {
    running.emplace_back([&] {
      at::set_num_threads(1);
      const at::NoGradGuard no_grad;
      work();
    });
  }
  work();
  running.clear();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The products of one step of the decoder with its weights.
class Products {
 public:
  Products(const cohort::nmt::TransformerOptions& sizes, cohort::nmt::Precision precision,
           int64_t rows) {
    const at::NoGradGuard no_grad;
    const auto context = std::make_shared<cohort::nmt::LayerContext>();
    context->precision = precision;
    const auto add = [&](int64_t in, int64_t out) {
      projections_.emplace_back(cohort::nmt::ProjectionShape{.in = in, .out = out}, context);
      auto& added = projections_.back();
      added->eval();
      if (precision == cohort::nmt::Precision::kInt8) {
        added->weight.random_(-127, 128);
        added->weight_scale.fill_(0.001);
      } else {
        added->weight.uniform_(-0.1, 0.1);
      }
      inputs_.push_back(at::randn({rows, in}));
      if (precision == cohort::nmt::Precision::kBFloat16)
        inputs_.back() = inputs_.back().to(at::kBFloat16);
    };
    const int64_t width = sizes.dim_emb;
    for (int64_t layer = 0; layer < sizes.dec_depth; ++layer) {
      add(width, 3 * width);
      for (int i = 0; i < 3; ++i) add(width, width);
      add(width, sizes.dim_ffn);
      add(sizes.dim_ffn, width);
    }
    add(width, sizes.dim_vocab_target);
  }
  // Any number of threads may call it.
  void operator()(int64_t steps) {
    const at::NoGradGuard no_grad;
    for (int64_t step = 0; step < steps; ++step)
      for (size_t i = 0; i < projections_.size(); ++i) projections_[i]->forward(inputs_[i]);
  }

 private:
  std::vector<cohort::nmt::Projection> projections_;
  std::vector<at::Tensor> inputs_;
};

// A shortlist that gives every sentence the same candidates.
std::shared_ptr<const cohort::nmt::Shortlist> shortlist_of(
    const cohort::nmt::TransformerOptions& sizes, int64_t candidates) {
  cohort::nmt::LexicalTable table{
      .offsets = std::vector<int64_t>(static_cast<size_t>(sizes.dim_vocab_source) + 1),
      .target_pieces = sizes.dim_vocab_target};
  const int64_t step = std::max<int64_t>(1, sizes.dim_vocab_target / candidates);
  for (int64_t piece = 4; piece < sizes.dim_vocab_target && std::ssize(table.frequent) < candidates;
       piece += step)
    table.frequent.push_back(static_cast<int32_t>(piece));
  return std::make_shared<const cohort::nmt::Shortlist>(
      table, cohort::nmt::ShortlistOptions{.first = candidates, .best = 0});
}

int run(const Options& options) {
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
  model->eval();
  SearchOptions search_options{.beam_size = options.beam_size,
                               .max_length = options.output_tokens,
                               .min_length = options.output_tokens,
                               .scores = false};
  if (options.candidates > 0)
    search_options.shortlist = shortlist_of(model->options(), options.candidates);
  const auto translate = [&] {
    for (const auto& hypotheses : search(model, source, lengths, search_options)) {
      TORCH_CHECK(std::ssize(hypotheses.front().tokens) == options.output_tokens,
                  "an output was not forced to its length");
    }
  };
  const auto tokens = static_cast<double>(options.batch * options.output_tokens);
  const int64_t threads = options.threads;
  std::optional<Products> products;
  if (threads > 1) products.emplace(model->options(), precision, options.batch * options.beam_size);
  const auto multiply = [&] { (*products)(options.output_tokens); };
  std::vector<double> rates, together, scaling, products_scaling;
  for (int64_t i = 0; i <= options.runs; ++i) {
    const double alone = tokens / seconds_of(1, translate);
    if (i > 0) rates.push_back(alone);  // The first warms up.
    if (threads == 1) continue;
    const auto all = static_cast<double>(threads);
    const double side_by_side = all * tokens / seconds_of(threads, translate);
    const double one = seconds_of(1, multiply), several = seconds_of(threads, multiply);
    if (i == 0) continue;
    together.push_back(side_by_side);
    scaling.push_back(side_by_side / alone);
    products_scaling.push_back(all * one / several);
  }
  nlohmann::ordered_json line = {{"bench", "nmt_decode"},
                                 {"tokens_per_s", median_of(rates)},
                                 {"tokens_per_s_each", rates},
                                 {"precision", to_string(precision)},
                                 {"beam_size", options.beam_size},
                                 {"batch", options.batch},
                                 {"source_tokens", options.source_tokens},
                                 {"output_tokens", options.output_tokens},
                                 {"params", params}};
  if (options.candidates > 0) line["candidates"] = options.candidates;
  if (threads > 1) {
    line["cpu_threads"] = threads;
    line["tokens_per_s_of_all_threads"] = median_of(together);
    line["scaling_each"] = scaling;
    line["products_scaling_each"] = products_scaling;
    line["scaling"] = median_of(scaling);
    line["products_scaling"] = median_of(products_scaling);
  }
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
  add("--cpu-threads", options.threads, "Searches at a time, each on one thread, beside one alone");
  app.add_option("--candidates", options.candidates,
                 "Target pieces that each sentence has of a shortlist (0: no shortlist)")
      ->capture_default_str()
      ->check(CLI::Range(0, 30000));
  app.add_option("--seed", options.seed, "Of the parameters")->capture_default_str();
  return cohort::run_program("nmt_decode", [&] {
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
