// Flags of search and score, shared by train, evaluate and translate.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/translate/evaluation.h"

namespace cohort::apps {

struct EvaluationFlags {
  std::string tokenize = "zh";
  translate::EvaluationOptions options;

  EvaluationFlags() { options.search.max_length = 128; }

  /// Flags of search and score.
  void add_to(CLI::App& app, const std::string& group) {
    app.add_option("--tokenize", tokenize, "sacreBLEU's tokenizer: 13a, zh, char or none")
        ->capture_default_str()
        ->group(group);
    add_search_to(app, group);
  }

  /// Flags of search alone.
  void add_search_to(CLI::App& app, const std::string& group) {
    app.add_option("--valid-mini-batch-words", options.mini_batch_words,
                   "Tokens per batch, padding included")
        ->capture_default_str()
        ->check(CLI::PositiveNumber)
        ->group(group);
    app.add_option("--max-length-factor", options.search.max_length_factor,
                   "Translations are at most this times the source's tokens, plus 10")
        ->capture_default_str()
        ->check(CLI::PositiveNumber)
        ->group(group);
    app.add_option("--max-output-length", options.search.max_length,
                   "Translations have at most so many tokens")
        ->capture_default_str()
        ->check(CLI::PositiveNumber)
        ->group(group);
  }

  translate::EvaluationOptions resolve() const {
    translate::EvaluationOptions result = options;
    using text::BleuTokenizer;
    if (tokenize == "13a")
      result.bleu.tokenizer = BleuTokenizer::k13a;
    else if (tokenize == "zh")
      result.bleu.tokenizer = BleuTokenizer::kZh;
    else if (tokenize == "char")
      result.bleu.tokenizer = BleuTokenizer::kChar;
    else if (tokenize == "none")
      result.bleu.tokenizer = BleuTokenizer::kNone;
    else
      throw ConfigError("--tokenize " + tokenize + ": expected 13a, zh, char or none");
    return result;
  }
};

}  // namespace cohort::apps
