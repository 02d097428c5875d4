// SPDX-License-Identifier: Apache-2.0
// `cohort nmt`: the translator's commands.
#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/program.h"
#include "cohort/cli/config_file.h"
#include "cohort/cli/parse.h"

#include "apps/nmt/bleu.h"
#include "apps/nmt/commands.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("Trains a Transformer translator, evaluates it and translates with it",
               "cohort nmt");
  app.require_subcommand(1);
  cohort::cli::Action action;
  cohort::cli::add_prepare_command(app, action);
  cohort::cli::add_train_command(app, action);
  cohort::cli::add_evaluate_command(app, action);
  cohort::cli::add_translate_command(app, action);
  cohort::cli::add_score_command(app, action);
  cohort::cli::add_bleu_command(app, action);
  cohort::cli::add_average_command(app, action);
  cohort::cli::add_quantize_command(app, action);
  cohort::cli::add_shortlist_command(app, action);
  cohort::cli::add_export_command(app, action);
  cohort::cli::add_info_command(app, action);
  cohort::cli::add_report_command(app, action);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; }))
    cohort::cli::add_config_flags(*command);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  cohort::cli::spell_out_bleu_names(arguments);
  if (const auto ended = cohort::cli::parse(app, std::move(arguments),
                                            "cohort nmt --help lists commands and flags"))
    return *ended;
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort nmt", [&] { return run(argc, argv); });
}
