// `cohort ps`: parameter servers, and what to ask them.
#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "cohort/base/program.h"

#include "apps/parse.h"
#include "apps/ps/commands.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("Parameter servers: they hold what trainers push to and pull from", "cohort ps");
  app.require_subcommand(1);
  cohort::apps::PsCommand command;
  cohort::apps::add_server_command(app, command);
  cohort::apps::add_status_command(app, command);
  cohort::apps::add_stop_command(app, command);
  cohort::apps::add_export_command(app, command);
  if (const auto ended = cohort::apps::parse(app, argc, argv)) return *ended;
  return command.run();
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort ps", [&] { return run(argc, argv); });
}
