// SPDX-License-Identifier: Apache-2.0
#include "apps/bench_decode.h"

#include <ATen/Parallel.h>
#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <torch/types.h>
#include <vector>

#include "cohort/base/console.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"
#include "cohort/nmt/decode_times.h"
#include "cohort/nmt/search.h"
#include "cohort/translate/lexical_table.h"
#include "cohort/translate/parallel_for.h"

#include "apps/nmt/trained_model.h"
#include "bench/median.h"

namespace cohort::apps {
namespace {

constexpr std::array<std::pair<const char*, const char*>, nmt::kDecodeSections> kDecodeNames{{
    {"search", "log-sums, top-k, reordering"},
    {"encoder", "encoder"},
    {"decoder_other", "decoder, norms and sums"},
    {"decoder_products", "decoder, products"},
    {"attention", "decoder, attention"},
    {"vocabulary", "vocabulary product"},
}};

nmt::Transformer random_model(const std::string& preset, std::optional<nmt::Precision> asked,
                              uint64_t seed) {
  const nmt::Precision precision = asked.value_or(nmt::best_precision(/*on_cpu=*/true));
  nmt::check_precision(precision, /*on_cpu=*/true);
  const bool int8 = precision == nmt::Precision::kInt8;
  nmt::Transformer model(nmt::preset(preset), int8 ? nmt::Precision::kFloat32 : precision);
  model->initialise(seed);
  if (int8) model = nmt::quantize(model);
  model->eval();
  return model;
}

using Times = std::array<double, nmt::kDecodeSections>;

struct DecodeProfile {
  Times seconds{};  // of a batch, by section
  double wall = 0;  // of all threads' batches together
};

// Each of `threads` searches the batch `rounds` times, after once to warm up.
DecodeProfile measure(nmt::Transformer& model, const at::Tensor& source, const at::Tensor& lengths,
                      const nmt::SearchOptions& search, size_t threads, size_t rounds) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<Times>> found(threads, std::vector<Times>(rounds + 1));
  std::vector<double> wall;
  for (size_t round = 0; round <= rounds; ++round) {
    const auto start = Clock::now();
    translate::parallel_for(threads,
                            [&](size_t begin, size_t) {
                              nmt::DecodeTimes times;
                              nmt::search(model, source, lengths, search);
                              found[begin][round] = times.seconds();
                            },
                            {.threads = threads, .taken = 1, .name = "decode"});
    if (round > 0) wall.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  DecodeProfile profile{.wall = bench::median_of(wall)};
  for (size_t section = 0; section < profile.seconds.size(); ++section) {
    std::vector<double> all;
    for (const auto& of_thread : found)
      for (size_t round = 1; round <= rounds; ++round) all.push_back(of_thread[round][section]);
    profile.seconds[section] = bench::median_of(all);
  }
  return profile;
}

}  // namespace

BenchDecode::BenchDecode(CLI::App& bench)
    : command_(*bench.add_subcommand("decode", "Where the time of a translator's search goes")) {
  command_.add_option("--model-dir", model_dir_, "A run's folder (default: random weights)")
      ->type_name("FOLDER");
  command_.add_option("--preset", preset_, "Sizes of the model with random weights")
      ->capture_default_str()
      ->check(CLI::IsMember({"tiny", "small", "base", "big"}))
      ->excludes("--model-dir");
  command_.add_option("--precision", precision_, "Precision of matrix products")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "bfloat16", "float32", "int8"}));
  command_.add_option("--shortlist", shortlist_, "A file of cohort nmt shortlist for that model")
      ->type_name("FILE")
      ->needs("--model-dir");
  const auto number = [&](const char* name, int64_t& value, const char* help) {
    command_.add_option(name, value, help)->capture_default_str()->check(CLI::Range(1, 10000));
  };
  number("--beam-size", beam_size_, "Width of the beam; 1 is greedy search");
  number("--rows", rows_, "Sentences in a batch");
  number("--source-tokens", source_tokens_, "Tokens of each sentence, the end mark included");
  number("--output-tokens", output_tokens_, "Tokens to which each translation is forced");
  number("--cpu-threads", threads_, "Batches at a time, each on one thread");
  number("--rounds", rounds_, "Searches of each thread, of whose times the medians count");
  command_.add_option("--seed", seed_, "Random seed of weights and sentences")
      ->capture_default_str();
  command_.add_flag("--json", json_, "Print one line of JSON instead");
}

int BenchDecode::run() {
  at::set_num_threads(1);
  std::optional<nmt::Precision> asked;
  if (precision_ != "auto") asked = nmt::parse_precision(precision_);
  nmt::Transformer model = model_dir_.empty() ? random_model(preset_, asked, seed_)
                                              : cli::load_trained(model_dir_, {}, asked).model;
  const nmt::TransformerOptions& sizes = model->options();
  for (const int64_t tokens : {source_tokens_, output_tokens_ + 1}) {
    if (tokens > sizes.max_positions) {
      throw ConfigError("--source-tokens and --output-tokens: expected at most " +
                        std::to_string(sizes.max_positions) + " with the end mark, got " +
                        std::to_string(tokens));
    }
  }
  torch::manual_seed(seed_);
  const at::Tensor source =
      at::randint(4, sizes.dim_vocab_source, {rows_, source_tokens_}, at::kLong);
  source.select(1, source_tokens_ - 1).fill_(3);  // the end mark
  const at::Tensor lengths = at::full({rows_}, source_tokens_, at::kLong);
  nmt::SearchOptions search{.beam_size = beam_size_,
                            .max_length = output_tokens_,
                            .min_length = output_tokens_,
                            .scores = false};
  search.max_length_factor = static_cast<double>(output_tokens_);
  if (!shortlist_.empty()) {
    search.shortlist = std::make_shared<const nmt::Shortlist>(
        translate::read_lexical_table(shortlist_, translate::vocab_files(model_dir_, {})),
        nmt::ShortlistOptions{});
  }
  const DecodeProfile profile = measure(
      model, source, lengths, search, static_cast<size_t>(threads_), static_cast<size_t>(rounds_));
  print(profile.seconds, profile.wall, *model);
  return kExitOk;
}

void BenchDecode::print(std::span<const double> seconds, double wall,
                        const nmt::TransformerImpl& model) const {
  const double tokens_per_s = static_cast<double>(threads_ * rows_ * output_tokens_) / wall;
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  Console console(0);
  if (json_) {
    nlohmann::ordered_json sections;
    for (size_t i = 0; i < seconds.size(); ++i)
      sections[kDecodeNames[i].first] = {{"ms", seconds[i] * 1e3}, {"share", seconds[i] / total}};
    const nlohmann::ordered_json line{{"bench", "decode"},
                                      {"precision", nmt::to_string(model.precision())},
                                      {"beam_size", beam_size_},
                                      {"rows", rows_},
                                      {"source_tokens", source_tokens_},
                                      {"output_tokens", output_tokens_},
                                      {"cpu_threads", threads_},
                                      {"params", nmt::count_parameters(model)},
                                      {"tokens_per_s", tokens_per_s},
                                      {"batch_ms", total * 1e3},
                                      {"wall_ms", wall * 1e3},
                                      {"sections", sections}};
    console.print("%s\n", line.dump().c_str());
    return;
  }
  console.print("# %s of %s, beam %lld, %s, %s: %.0f tokens/s\n",
                cli::counted(rows_, "sentence").c_str(),
                cli::counted(source_tokens_, "token").c_str(), static_cast<long long>(beam_size_),
                nmt::to_string(model.precision()).c_str(), cli::counted(threads_, "thread").c_str(),
                tokens_per_s);
  console.print("%-28s %10s %7s\n", "section", "ms", "%");
  for (size_t i = 0; i < seconds.size(); ++i)
    console.print("%-28s %10.2f %7.1f\n", kDecodeNames[i].second, seconds[i] * 1e3,
                  seconds[i] / total * 100);
  console.print("%-28s %10.2f %7.1f\n", "batch", total * 1e3, 100.0);
}

}  // namespace cohort::apps
