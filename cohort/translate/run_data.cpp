// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_data.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

#include "cohort/base/checksum.h"
#include "cohort/translate/prepare.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

}  // namespace

ValidText read_valid_text(const TrainingOptions& options) {
  ValidText text{.pairs = text::read_parallel_text(options.valid_sets), .sha256 = {}};
  for (const fs::path& file : options.valid_sets) text.sha256 += sha256_of_file(file.string());
  return text;
}

RunData prepare_data(const TrainingOptions& options, ValidText valid_text, Start start,
                     const comm::ProcessGroup& group) {
  const auto begin = Clock::now();
  const bool rebuild = start == Start::kFresh && options.overwrite && options.vocabs.empty();
  MadeTokenizers made = prepare_vocabularies(options, rebuild, group);
  Corpus valid = tokenize(valid_text.pairs, made.tokenizers.source, made.tokenizers.target);
  check_lengths("--valid-sets", valid, options.model.max_positions);
  TrainingText train = prepare_tokens(options, made, group);
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  return {
      std::move(made.tokenizers),  std::move(made.fresh),        std::move(train), std::move(valid),
      std::move(valid_text.pairs), std::move(valid_text.sha256), seconds.count()};
}

void keep_vocabularies(const TrainingOptions& options, FreshFiles& fresh) {
  const auto files = vocab_files_of(options);
  const auto own = vocab_files(options.model_dir, {});
  for (size_t side = 0; side < 2; ++side) {
    // Another run may put its own file there at any time: this run's is the one that it has read.
    const fs::path now = fresh.now(files[side]);
    if (fs::weakly_canonical(files[side]) == fs::weakly_canonical(own[side])) continue;
    if (fs::exists(own[side]) && fs::equivalent(now, own[side])) continue;
    fs::copy_file(now, own[side], fs::copy_options::overwrite_existing);
  }
  fresh.keep();
}

}  // namespace cohort::translate
