// SPDX-License-Identifier: Apache-2.0
// `cohort nmt prepare`: vocabularies and token cache ahead of training.
#include "cohort/translate/prepare.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/option_flags.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/model_flags.h"

namespace cohort::cli {
namespace {

struct PrepareFlags {
  translate::TrainingOptions options;
  std::vector<int64_t> dim_vocabs;
};

long long number(int64_t value) {
  return static_cast<long long>(value);
}

int run(PrepareFlags& flags) {
  auto& options = flags.options;
  if (flags.dim_vocabs.empty()) flags.dim_vocabs = translate::vocabulary_sizes(options);
  options.model.dim_vocab_source = flags.dim_vocabs[0];
  options.model.dim_vocab_target = flags.dim_vocabs[1];
  nmt::validate(options.model);
  std::error_code error;
  std::filesystem::create_directories(options.model_dir, error);
  if (!std::filesystem::is_directory(options.model_dir)) {
    throw ConfigError("--model-dir " + options.model_dir + " cannot be made: " + error.message());
  }
  const auto start = std::chrono::steady_clock::now();
  comm::ProcessGroup alone(comm::RankInfo{});
  auto made = translate::prepare_vocabularies(options, /*rebuild=*/false, alone);
  const auto text = translate::prepare_tokens(options, made, alone);
  made.fresh.keep();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const translate::PairCounts& pairs = text.counts;
  std::printf("%s read: %lld kept, %lld cropped, %lld dropped as too long, %lld as empty\n",
              counted(pairs.read, "pair").c_str(), number(pairs.kept), number(pairs.cropped),
              number(pairs.dropped_long), number(pairs.dropped_empty));
  std::printf("token cache %s: %s, after %.1f s\n", text.file.c_str(), text.origin.c_str(),
              seconds.count());
  alone.close();
  return 0;
}

}  // namespace

void add_prepare_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("prepare", "Make vocabularies and tokenise ahead of training");
  auto flags = std::make_shared<PrepareFlags>();
  add_options(*command, translate::text_options(flags->options), "Data");
  add_dim_vocabs(*command, flags->dim_vocabs, "Data");
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
