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

bool is_missing(const fs::path& file) {
  return !fs::exists(file);
}

// A folder that is not there would show only when the vocabulary is written, after minutes.
void check_folder(const fs::path& file) {
  const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
  if (fs::is_directory(folder)) return;
  throw ConfigError("--vocabs " + file.string() + ": expected a folder that exists, got " +
                    folder.string());
}

// The line says it before the time that it takes: a mistyped path is a file that is missing.
void announce(const Log& log, const fs::path& file, int64_t pieces, const std::string& reason) {
  log.info("training a new SentencePiece vocabulary of " + std::to_string(pieces) +
           " pieces into " + file.string() + ": " + reason);
}

}  // namespace

std::vector<fs::path> vocab_files_of(const TrainingOptions& options) {
  return vocab_files(options.model_dir, options.vocabs,
                     options.joined_dictionary ? Dictionary::kJoined : Dictionary::kTwo);
}

std::vector<int64_t> vocabulary_sizes(const TrainingOptions& options) {
  std::vector<int64_t> sizes{options.model.dim_vocab_source, options.model.dim_vocab_target};
  if (options.overwrite && options.vocabs.empty()) return sizes;
  const auto files = vocab_files_of(options);
  for (size_t side = 0; side < files.size(); ++side) {
    if (!is_missing(files[side])) sizes[side] = text::Tokenizer(files[side]).num_pieces();
  }
  return sizes;
}

MadeTokenizers prepare_vocabularies(const TrainingOptions& options, bool rebuild,
                                    const comm::ProcessGroup& group) {
  if (options.max_length >= options.model.max_positions) {
    throw ConfigError("--max-length " + std::to_string(options.max_length) + ": expected at most " +
                      std::to_string(options.model.max_positions - 1));
  }
  const auto files = vocab_files_of(options);
  const bool makes_one = rebuild || std::ranges::any_of(files, is_missing);
  const Log log({.rank = group.rank(), .world_size = group.size(), .level = options.log_level});
  text::ParallelText sample;
  run_on_ranks(
      group, "a sample of the training text", group.rank() == 0 && makes_one, kSampleLimit, [&] {
        text::check_regular_files(options.train_sets);
        for (const fs::path& file : files) check_folder(file);
        const size_t num_files = files[0] == files[1] ? 1 : 2;
        for (size_t side = 0; side < num_files && !options.quiet; ++side) {
          if (!rebuild && !is_missing(files[side])) continue;
          announce(log, files[side],
                   side == 0 ? options.model.dim_vocab_source : options.model.dim_vocab_target,
                   is_missing(files[side]) ? "there is no such file" : "--overwrite");
        }
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
