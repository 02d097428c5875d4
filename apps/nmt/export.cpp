// SPDX-License-Identifier: Apache-2.0
// `cohort nmt export`: a run's best model for another program.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/cli/parse.h"
#include "cohort/translate/ctranslate2.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

struct ExportFlags {
  std::string to;
  std::string model_dir;
  std::string output_dir;
  std::vector<std::filesystem::path> vocabs;
};

int run(const ExportFlags& flags) {
  if (flags.to != "ctranslate2") throw ConfigError("--to " + flags.to + ": expected ctranslate2");
  const auto trained = load_trained(flags.model_dir, flags.vocabs, nmt::Precision::kFloat32);
  translate::write_ctranslate2(flags.output_dir, trained.model, trained.tokenizers,
                               translate::vocab_files(flags.model_dir, flags.vocabs));
  std::printf("%s is a CTranslate2 model, with source.spm and target.spm to cut and join text\n",
              flags.output_dir.c_str());
  return 0;
}

}  // namespace

void add_export_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("export", "Write a trained model for another program");
  auto flags = std::make_shared<ExportFlags>();
  command->add_option("--to", flags->to, "The other program")
      ->check(one_of({"ctranslate2"}))
      ->required();
  add_options(
      *command,
      {{"--model-dir", &flags->model_dir, "The run's folder", {.unit = kFolder, .required = true}},
       {"--output-dir", &flags->output_dir, "A new folder", {.unit = kFolder, .required = true}},
       {"--vocabs",
        &flags->vocabs,
        "Source and target .spm file (default: in --model-dir)",
        {.unit = kFile, .min_values = 2, .max_values = 2}}});
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
