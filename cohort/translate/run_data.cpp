// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_data.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/translate/prepare.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Validation keeps every sentence, so one that the model cannot hold is refused before training.
void check_lengths(const Corpus& corpus, int64_t max_positions) {
  for (int64_t i = 0; i < corpus.size(); ++i) {
    const auto [source, target] = corpus.lengths()[static_cast<size_t>(i)];
    const int64_t tokens = std::max(source, target);
    if (tokens > max_positions) {
      throw ConfigError("--valid-sets: pair " + std::to_string(i + 1) + " has " +
                        std::to_string(tokens) + " tokens: expected at most " +
                        std::to_string(max_positions));
    }
  }
}

}  // namespace

RunData prepare_data(const TrainingOptions& options, text::ParallelText valid_text, Start start,
                     const comm::ProcessGroup& group) {
  const auto begin = Clock::now();
  const bool rebuild = start == Start::kFresh && options.overwrite && options.vocabs.empty();
  MadeTokenizers made = prepare_vocabularies(options, rebuild, group);
  Corpus valid = tokenize(valid_text, made.tokenizers.source, made.tokenizers.target);
  check_lengths(valid, options.model.max_positions);
  TrainingText train = prepare_tokens(options, made, group);
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  return {std::move(made.tokenizers), std::move(made.fresh), std::move(train),
          std::move(valid),           std::move(valid_text), seconds.count()};
}

void keep_vocabularies(const TrainingOptions& options, FreshFiles& fresh) {
  fresh.keep();
  const auto files = vocab_files_of(options);
  const auto own = vocab_files(options.model_dir, {});
  for (size_t side = 0; side < 2; ++side) {
    if (fs::exists(own[side]) && fs::equivalent(files[side], own[side])) continue;
    fs::copy_file(files[side], own[side], fs::copy_options::overwrite_existing);
  }
}

}  // namespace cohort::translate
