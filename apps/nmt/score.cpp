// SPDX-License-Identifier: Apache-2.0
// `cohort nmt score`: log-probabilities of given translations, one line a pair, in order.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/option_flags.h"
#include "cohort/text/text_file.h"
#include "cohort/translate/scoring.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPairsAhead = 4096;  // read, sorted by length and scored at a time

struct ScoreFlags {
  ModelPlace model;
  std::vector<fs::path> test_sets;
  double normalize = 0;
  int64_t mini_batch_words = 2048;
  bool word_scores = false;
  bool json = false;
};

class File {
 public:
  explicit File(const fs::path& path)
      : stream_(text::open_text(path)), lines_(stream_, path.string()) {}
  bool next(std::string& line) { return lines_.next(line); }
  int64_t number() const { return lines_.number(); }

 private:
  std::ifstream stream_;
  text::LineReader lines_;
};

// Pairs from two files, or from one of source<TAB>target lines; empty sides stay, so that every
// line has its score.
class Pairs {
 public:
  explicit Pairs(const std::vector<fs::path>& paths) : paths_(paths) {
    if (paths.size() == 1 && paths[0].extension() != ".tsv") {
      throw ConfigError("--test-sets " + paths[0].string() +
                        ": expected a .tsv file, or two files (source, target)");
    }
    for (const fs::path& path : paths) files_.push_back(std::make_unique<File>(path));
  }

  bool next(std::string& source, std::string& target) {
    if (files_.size() == 1) return next_of_table(source, target);
    const bool has_source = files_[0]->next(source);
    const bool has_target = files_[1]->next(target);
    if (has_source == has_target) return has_source;
    const size_t shorter = has_source ? 1 : 0;
    throw ConfigError(paths_[shorter].string() + " ends after " +
                      counted(files_[shorter]->number(), "line") + " but " +
                      paths_[1 - shorter].string() + " has more: expected as many");
  }
  // "FILE: line N" of the pair that was read last.
  std::string source_place() const { return place(0); }
  std::string target_place() const { return place(files_.size() - 1); }

 private:
  std::string place(size_t file) const {
    return paths_[file].string() + ": line " + std::to_string(files_[file]->number());
  }
  bool next_of_table(std::string& source, std::string& target) {
    if (!files_[0]->next(source)) return false;
    const auto tabs = std::count(source.begin(), source.end(), '\t');
    if (tabs != 1) {
      throw ConfigError(place(0) + ": expected source<TAB>target, found " + std::to_string(tabs) +
                        " tabs");
    }
    const size_t tab = source.find('\t');
    target = source.substr(tab + 1);
    source.resize(tab);
    return true;
  }

  std::vector<fs::path> paths_;
  std::vector<std::unique_ptr<File>> files_;
};

// Reads all once, so that bad files are refused before anything is printed. What can be read only
// once (a pipe) is not.
void check(const std::vector<fs::path>& paths) {
  const auto is_regular = [](const fs::path& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    return error || fs::is_regular_file(status);  // What cannot be examined is refused by Pairs.
  };
  if (!std::ranges::all_of(paths, is_regular)) return;
  Pairs pairs(paths);
  for (std::string source, target; pairs.next(source, target);) continue;
}

void print(const std::vector<double>& log_probs, const ScoreFlags& flags) {
  const double sum = std::accumulate(log_probs.begin(), log_probs.end(), 0.0);
  const double score = sum / std::pow(static_cast<double>(log_probs.size()), flags.normalize);
  if (flags.json) {
    nlohmann::ordered_json line = {
        {"score", score}, {"log_prob", sum}, {"tokens", log_probs.size()}};
    if (flags.word_scores) line["word_scores"] = log_probs;
    std::printf("%s\n", line.dump().c_str());
    return;
  }
  std::printf("%.6f", score);
  if (flags.word_scores) {
    std::printf(" ||| WordScores=");
    for (const double log_prob : log_probs) std::printf(" %.6f", log_prob);
  }
  std::printf("\n");
}

int run(const ScoreFlags& flags) {
  check(flags.test_sets);
  auto [model, tokenizers] = load_trained(flags.model);
  Pairs pairs(flags.test_sets);
  std::vector<std::vector<int32_t>> sources, targets;
  const auto flush = [&] {
    const translate::Corpus window(sources, targets);
    for (const auto& log_probs : translate::token_log_probs(model, window, flags.mini_batch_words))
      print(log_probs, flags);
    if (std::fflush(stdout) != 0)
      throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
    sources.clear();
    targets.clear();
  };
  const int64_t limit = model->options().max_positions - 1;
  const auto expect_within_limit = [limit](const std::vector<int32_t>& tokens, const char* side,
                                           const std::string& place) {
    if (std::ssize(tokens) <= limit) return;
    throw ConfigError(place + " has " + std::to_string(tokens.size()) + " " + side +
                      " tokens: expected at most " + std::to_string(limit));
  };
  try {
    for (std::string source, target; pairs.next(source, target);) {
      auto source_tokens = tokenizers.source.encode(source);
      auto target_tokens = tokenizers.target.encode(target);
      expect_within_limit(source_tokens, "source", pairs.source_place());
      expect_within_limit(target_tokens, "target", pairs.target_place());
      sources.push_back(std::move(source_tokens));
      targets.push_back(std::move(target_tokens));
      if (std::ssize(sources) == kPairsAhead) flush();
    }
  } catch (const ConfigError&) {
    flush();  // What came before the bad line has its score.
    throw;
  }
  flush();
  return 0;
}

}  // namespace

void add_score_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("score", "Log-probabilities of given translations");
  auto flags = std::make_shared<ScoreFlags>();
  flags->model.add_to(*command);
  flags->model.add_device_to(*command);
  add_options(*command,
              {{"--test-sets",
                &flags->test_sets,
                "Source and target text, or one .tsv file; empty lines have scores, too",
                {.unit = kFile, .max_values = 2, .required = true}},
               {"--mini-batch-words", &flags->mini_batch_words,
                "Tokens of a batch, padding included", rule(kAboveZero, kTokens)}},
              "Texts");
  add_options(*command,
              {{"--normalize", &flags->normalize, "Print log p / length^this, the end mark counted",
                rule(kFinite)},
               {"--word-scores", &flags->word_scores,
                "Print log p of each token, too, the end mark's last"},
               {"--json", &flags->json,
                "Print a JSON line for each pair: score, log_prob, tokens (the end mark counted)"}},
              "Output");
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
