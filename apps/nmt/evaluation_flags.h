// Flags of search and score, shared by train, evaluate and translate.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cohort/translate/evaluation.h"

#include "cohort/cli/parse.h"

namespace cohort::cli {

/// During training translations are many, and only compared with each other: greedy, and short, so
/// that a model that never ends a sentence costs little.
inline nmt::SearchOptions validation_search() {
  return {.beam_size = 1, .max_length = 60};
}

/// For translations that are read.
inline nmt::SearchOptions full_search() {
  return {.beam_size = 6, .normalize = 1};
}

struct EvaluationFlags {
  std::string tokenize = text::to_string(text::BleuOptions{}.tokenizer);
  translate::EvaluationOptions options;

  explicit EvaluationFlags(const nmt::SearchOptions& search) { options.search = search; }

  /// Flags of search and score.
  void add_to(CLI::App& app, const std::string& group) {
    app.add_option("--tokenize", tokenize,
                   "sacreBLEU's tokenizer: 13a for languages with spaces, zh for Chinese")
        ->check(one_of({"13a", "intl", "zh", "char", "none"}))
        ->capture_default_str()
        ->group(group);
    app.add_option("--valid-mini-batch-words", options.mini_batch_words,
                   "Tokens of a batch, padding included")
        ->type_name(kTokens)
        ->capture_default_str()
        ->check(above_zero())
        ->group(group);
    add_search_to(app, group);
  }

  /// Flags of search alone.
  void add_search_to(CLI::App& app, const std::string& group) {
    app.add_option("--beam-size", options.search.beam_size,
                   "Translations followed at a time; 1 is greedy search")
        ->capture_default_str()
        ->check(CLI::Range(1, 1000))
        ->group(group);
    app.add_option("--normalize", options.search.normalize,
                   "Compare translations by log p / length^this")
        ->check(finite())
        ->capture_default_str()
        ->group(group);
    app.add_option("--word-penalty", options.search.word_penalty,
                   "Subtract this times the length; below 0 it favours long ones")
        ->check(finite())
        ->capture_default_str()
        ->group(group);
    app.add_flag("--allow-unk", options.search.allow_unk,
                 "Let the unknown piece appear in translations")
        ->group(group);
    app.add_option("--max-length-factor", options.search.max_length_factor,
                   "Translations are at most this times the source's tokens, plus 10")
        ->capture_default_str()
        ->check(above_zero())
        ->group(group);
    app.add_option("--min-output-length", options.search.min_length,
                   "Translations have at least so many tokens, as far as the longest length allows")
        ->type_name(kTokens)
        ->capture_default_str()
        ->check(whole_number())
        ->group(group);
    app.add_option("--max-output-length", options.search.max_length,
                   "Translations have at most so many tokens")
        ->type_name(kTokens)
        ->capture_default_str()
        ->check(above_zero())
        ->group(group);
  }

  /// Flags of sampling, for programs whose output may be random.
  void add_sampling_to(CLI::App& app, const std::string& group) {
    nmt::SamplingOptions& sampling = options.search.sampling;
    auto* enabled = app.add_flag("--sampling", sampling.enabled,
                                 "Draw translations at random instead of searching the likeliest")
                        ->group(group);
    const auto add = [&](const char* name, auto& value, const char* help) {
      return app.add_option(name, value, help)->capture_default_str()->needs(enabled)->group(group);
    };
    add("--sampling-topk", sampling.topk, "Draw from so many likeliest tokens; 0: from all")
        ->check(whole_number());
    add("--sampling-topp", sampling.topp, "Draw from the likeliest tokens that reach this share")
        ->check(number_that([](double p) { return p > 0 && p <= 1; }, "above 0, at most 1"));
    add("--temperature", sampling.temperature, "Below 1 the likely become likelier")
        ->check(above_zero());
    add("--seed", sampling.seed, "The same seed draws the same translations")
        ->check(whole_number());
  }

  translate::EvaluationOptions resolve() const {
    translate::EvaluationOptions result = options;
    result.bleu.tokenizer = text::parse_bleu_tokenizer(tokenize);
    return result;
  }
};

}  // namespace cohort::cli
