// SPDX-License-Identifier: Apache-2.0
// `cohort nmt report`: the page about a run, made again from the run's record.
#include "cohort/translate/report.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cohort/cli/parse.h"

#include "apps/nmt/commands.h"

namespace cohort::cli {

void add_report_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("report", "Write a run's report.html again, from its record");
  auto model_dir = std::make_shared<std::string>();
  command->add_option("--model-dir", *model_dir, "The run's folder")
      ->type_name(kFolder)
      ->required();
  command->callback([model_dir, &action] {
    action = [model_dir] {
      translate::write_report(*model_dir);
      std::printf("%s/report.html\n", model_dir->c_str());
      return 0;
    };
  });
}

}  // namespace cohort::cli
