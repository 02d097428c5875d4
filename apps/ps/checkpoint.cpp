// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <limits>
#include <memory>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"
#include "cohort/ps/server/serving_export.h"

#include "apps/ps/commands.h"

namespace cohort::cli {

namespace {

struct ExportFlags {
  std::string checkpoint;
  std::string output;
  int64_t pushed_since = 0;
};

int run_export(const ExportFlags& flags) {
  constexpr int64_t kLatest = std::numeric_limits<uint32_t>::max();
  if (flags.pushed_since > kLatest)
    throw ConfigError("--pushed-since: expected seconds since 1970, at most " +
                      std::to_string(kLatest) + ", got " + std::to_string(flags.pushed_since));
  for (const ps::ServingFile& file : ps::export_for_serving(
           flags.checkpoint, flags.output, static_cast<uint32_t>(flags.pushed_since)))
    std::printf("%s  %s\n", file.path.c_str(), counted(file.count, file.what).c_str());
  return kExitOk;
}

}  // namespace

void add_export_command(CLI::App& app, PsCommand& command) {
  auto flags = std::make_shared<ExportFlags>();
  CLI::App* const subcommand =
      app.add_subcommand("export", "Exports a checkpoint of servers to files for serving");
  subcommand->add_option("checkpoint", flags->checkpoint, "Folder that Session::save wrote")
      ->required()
      ->type_name(kFolder);
  subcommand
      ->add_option("--output", flags->output,
                   "Folder that receives dense.safetensors and TABLE.safetensors")
      ->required()
      ->type_name(kFolder);
  subcommand
      ->add_option(
          "--pushed-since", flags->pushed_since,
          "Export only rows with a push since this time, in seconds since 1970 (default: all)")
      ->check(whole_number());
  subcommand->callback([flags, &command] { command.run = [flags] { return run_export(*flags); }; });
}

}  // namespace cohort::cli
