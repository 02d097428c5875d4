// SPDX-License-Identifier: Apache-2.0
// The commands of `cohort ps`, one file each.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>

namespace cohort::cli {

/// What the command line chose.
struct PsCommand {
  std::function<int()> run;
};

void add_server_command(CLI::App& app, PsCommand& command);
void add_status_command(CLI::App& app, PsCommand& command);
void add_stop_command(CLI::App& app, PsCommand& command);
void add_export_command(CLI::App& app, PsCommand& command);

}  // namespace cohort::cli
