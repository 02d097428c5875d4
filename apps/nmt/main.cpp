// `cohort nmt`: the translator's commands.
#include <CLI/CLI.hpp>

#include "cohort/base/program.h"

#include "apps/nmt/bleu.h"
#include "apps/nmt/commands.h"
#include "apps/parse.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("Trains a Transformer translator, evaluates it and translates with it",
               "cohort nmt");
  app.require_subcommand(1);
  cohort::apps::Action action;
  cohort::apps::add_train_command(app, action);
  cohort::apps::add_evaluate_command(app, action);
  cohort::apps::add_translate_command(app, action);
  cohort::apps::add_bleu_command(app, action);
  cohort::apps::add_average_command(app, action);
  cohort::apps::add_info_command(app, action);
  if (const auto ended =
          cohort::apps::parse(app, argc, argv, "cohort nmt --help lists commands and flags"))
    return *ended;
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort nmt", [&] { return run(argc, argv); });
}
