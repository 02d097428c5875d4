// SPDX-License-Identifier: Apache-2.0
// `cohort ps`: parameter servers, and what to ask them.
#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "cohort/base/program.h"
#include "cohort/cli/parse.h"

#include "apps/ps/commands.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("Runs and queries parameter servers", "cohort ps");
  app.require_subcommand(1);
  cohort::cli::PsCommand command;
  cohort::cli::add_server_command(app, command);
  cohort::cli::add_status_command(app, command);
  cohort::cli::add_stop_command(app, command);
  cohort::cli::add_export_command(app, command);
  if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
  return command.run();
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort ps", [&] { return run(argc, argv); });
}
