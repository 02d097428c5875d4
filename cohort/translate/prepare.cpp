// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/prepare.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/text/parallel_text.h"
#include "cohort/translate/run_on_ranks.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

// Reading a hundred million lines takes minutes.
constexpr std::chrono::hours kSampleLimit{2};

}  // namespace

std::vector<fs::path> vocab_files_of(const TrainingOptions& options) {
  return vocab_files(options.model_dir, options.vocabs,
                     options.joined_dictionary ? Dictionary::kJoined : Dictionary::kTwo);
}

MadeTokenizers prepare_vocabularies(const TrainingOptions& options, bool rebuild,
                                    const comm::ProcessGroup& group) {
  if (options.max_length >= options.model.max_positions) {
    throw ConfigError("--max-length " + std::to_string(options.max_length) + ": expected at most " +
                      std::to_string(options.model.max_positions - 1));
  }
  const auto files = vocab_files_of(options);
  const bool makes_one =
      rebuild || !std::ranges::all_of(files, [](const fs::path& file) { return fs::exists(file); });
  text::ParallelText sample;
  run_on_ranks(
      group, "a sample of the training text", group.rank() == 0 && makes_one, kSampleLimit, [&] {
        text::check_regular_files(options.train_sets);
        sample = text::sample_parallel_text(options.train_sets, options.sentencepiece_max_lines);
      });
  return make_tokenizers(files, sample, options.model, rebuild, group);
}

TrainingText prepare_tokens(const TrainingOptions& options, const MadeTokenizers& vocabularies,
                            const comm::ProcessGroup& group) {
  const TokenCacheInputs inputs{
      .text = options.train_sets,
      .vocabularies = vocabularies.files,
      .lengths = {.max_length = options.max_length, .max_length_crop = options.max_length_crop}};
  const Log log({.rank = group.rank(), .world_size = group.size(), .level = options.log_level});
  BuildNews news;
  if (!options.quiet) {
    news.tell = [&log](int64_t num_pairs) {
      log.info("tokenising the training text", {{"pairs_done", num_pairs}});
    };
  }
  return cached_text(token_cache_file(inputs, options.cache_dir, options.model_dir), inputs,
                     vocabularies.tokenizers.source, vocabularies.tokenizers.target, group, news);
}

}  // namespace cohort::translate
