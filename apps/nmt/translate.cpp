// SPDX-License-Identifier: Apache-2.0
// `cohort nmt translate`: lines from stdin to stdout, in order.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/cli/option_flags.h"
#include "cohort/text/text_file.h"
#include "cohort/translate/evaluation.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/shortlist_flag.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

struct TranslateFlags {
  ModelPlace model;
  int64_t mini_batch = 64;
  int64_t maxi_batch = 16;
  int64_t cpu_threads = 0;
  bool max_length_crop = false;
  bool n_best = false;
  ShortlistFlag shortlist;
  translate::EvaluationOptions evaluation = full_search();
};

// A text may hold a NUL, where printf would end it.
void print_text(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

// Of a sentence's translations the best, or all as "number ||| text ||| log p ||| score".
void print(int64_t number, const std::vector<translate::Translation>& translations, bool n_best) {
  if (!n_best) {
    print_text(translations.front().text + "\n");
    return;
  }
  for (const auto& t : translations) {
    std::printf("%lld ||| ", static_cast<long long>(number));
    print_text(t.text);
    std::printf(" ||| Logprob= %.6f ||| %.6f\n", t.log_prob, t.score);
  }
}

// Translates lines as they come: a window of them is read, translated in batches of like length,
// printed in order and forgotten.
class Stream {
 public:
  Stream(const TranslateFlags& flags, TrainedModel& trained)
      : trained_(trained), n_best_(flags.n_best), options_(flags.evaluation) {
    options_.mini_batch = flags.mini_batch;
    options_.threads = std::max<int64_t>(flags.cpu_threads, 1);
    // On a terminal a line is translated before the next is typed. Elsewhere the window does not
    // depend on when lines come, so that equal input gives equal batches.
    window_ =
        ::isatty(STDIN_FILENO) == 1 ? 1 : static_cast<size_t>(flags.mini_batch * flags.maxi_batch);
    max_tokens_ = trained.model->options().max_positions - 1;
    crop_ = flags.max_length_crop;
    // A sample does not depend on how many others are drawn: none is drawn that is not printed.
    if (options_.search.sampling.enabled && !n_best_) options_.search.beam_size = 1;
    options_.search.scores = n_best_;
  }

  void run() {
    try {
      for (std::string line; lines_.next(line);) {
        add(line);
        if (sources_.size() == window_) flush();
      }
    } catch (const ConfigError&) {
      flush();  // What came before the bad line has its translation.
      throw;
    }
    flush();
  }

 private:
  void add(const std::string& line) {
    std::vector<int32_t> source = trained_.tokenizers.source.encode(line);
    if (std::ssize(source) > max_tokens_ && !crop_) {
      throw ConfigError("standard input: line " + std::to_string(lines_.number()) + " has " +
                        std::to_string(source.size()) + " tokens: expected at most " +
                        std::to_string(max_tokens_) + " (--max-length-crop cuts longer ones)");
    }
    if (std::ssize(source) > max_tokens_) source.resize(static_cast<size_t>(max_tokens_));
    sources_.push_back(std::move(source));
  }

  void flush() {
    options_.first_number = number_;
    for (const auto& translations :
         translate::translate_all(trained_.model, sources_, trained_.tokenizers.target, options_)) {
      print(number_++, translations, n_best_);
    }
    sources_.clear();
    if (std::fflush(stdout) != 0)
      throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
  }

  TrainedModel& trained_;
  bool n_best_;
  bool crop_ = false;
  translate::EvaluationOptions options_;
  size_t window_ = 1;
  int64_t max_tokens_ = 0;
  text::LineReader lines_{std::cin, "standard input"};
  std::vector<std::vector<int32_t>> sources_;
  int64_t number_ = 0;
};

Options sampling_options(nmt::SamplingOptions& o) {
  return {
      {"--sampling", &o.enabled, "Sample translations instead of searching for the most likely"},
      {"--sampling-topk",
       &o.topk,
       "Sample from the N most likely tokens (0: from all)",
       {.limits = kWholeNumber, .needs = "--sampling"}},
      {"--sampling-topp",
       &o.topp,
       "Sample from the most likely tokens whose probabilities add up to X",
       {.limits = {[](double p) { return p > 0 && p <= 1; }, "above 0, at most 1"},
        .needs = "--sampling"}},
      {"--temperature",
       &o.temperature,
       "Temperature of the distribution; below 1 likely tokens become likelier",
       {.limits = kAboveZero, .needs = "--sampling"}},
      {"--seed",
       &o.seed,
       "Random seed; the same seed gives the same translations",
       {.limits = kWholeNumber, .needs = "--sampling"}},
  };
}

int run(TranslateFlags& flags) {
  flags.evaluation.search.shortlist = flags.shortlist.read(flags.model);
  TrainedModel trained = load_trained(flags.model);
  if (flags.cpu_threads > 0) {
    if (!trained.model->device().is_cpu()) {
      throw ConfigError("--cpu-threads " + std::to_string(flags.cpu_threads) +
                        ": expected --device cpu");
    }
    at::set_num_threads(1);
  }
  Stream(flags, trained).run();
  return 0;
}

}  // namespace

void add_translate_command(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("translate", "Translate lines from standard input to standard output");
  auto flags = std::make_shared<TranslateFlags>();
  flags->model.add_to(*command);
  flags->model.add_device_to(*command);
  const Limits size = {[](double n) { return n >= 1 && n <= 1 << 20; }, "1 to 1048576"};
  add_options(
      *command,
      {{"--mini-batch", &flags->mini_batch, "Largest number of sentences in a batch", rule(size)},
       {"--mini-batch-words", &flags->evaluation.mini_batch_words,
        "Largest number of tokens in a batch, padding included", rule(kAboveZero, kTokens)},
       {"--maxi-batch", &flags->maxi_batch,
        "Read the lines of this many batches ahead and sort them by length; with "
        "--mini-batch 1 --maxi-batch 1, and on a terminal, each line is answered at once",
        rule(size)},
       {"--cpu-threads", &flags->cpu_threads,
        "Translate this many batches at a time, each on one thread (0: one, on all cores)",
        rule({[](double n) { return n >= 0 && n <= 1024; }, "0 to 1024"})},
       {"--max-length-crop", &flags->max_length_crop,
        "Truncate lines with more tokens than the model has positions, instead of rejecting them"}},
      "Batches");
  add_options(*command,
              {{"--n-best", &flags->n_best,
                "Print all translations of the beam with their scores, best first: number ||| "
                "text ||| Logprob= log p ||| score"}},
              "Output");
  nmt::SearchOptions& search = flags->evaluation.search;
  add_options(*command, translate::search_options(search), "Search");
  add_options(*command, {flags->shortlist.option()}, "Search");
  add_options(*command, sampling_options(search.sampling), "Sampling");
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
