// SPDX-License-Identifier: Apache-2.0
// `cohort nmt train`: flags, wiring and the last lines.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cohort/base/console.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/group_flags.h"
#include "cohort/cli/offload_flag.h"
#include "cohort/cli/option_flags.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/module/host_ranks.h"
#include "cohort/train/progress.h"
#include "cohort/translate/prepare.h"
#include "cohort/translate/report.h"
#include "cohort/translate/training.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/model_flags.h"

namespace cohort::cli {
namespace {

struct TrainFlags {
  translate::TrainingOptions options;
  ModelFlags model;
  GroupFlags group;
  ps::SecurityOptions security;
};

// Curves on a terminal; in files and pipes the numbers alone.
void print_summary(const translate::TrainingOptions& options, const Console& console) {
  const bool terminal = train::is_terminal(STDOUT_FILENO);
  const bool utf8 = train::glyphs_of_locale() == train::ProgressGlyphs::kBlocks;
  try {
    const std::string summary = translate::run_summary(
        options.model_dir, {.width = 80, .sparklines = terminal, .utf8 = utf8});
    console.print("%sreport: %s/report.html\n", summary.c_str(), options.model_dir.c_str());
  } catch (const std::exception& error) {  // The run itself has succeeded.
    console.print("no summary: %s\n", one_line(error).c_str());
  }
}

void add_flags(CLI::App& app, TrainFlags& flags) {
  auto& options = flags.options;
  options.precision.reset();
  add_options(app, translate::data_options(options), "Data");
  flags.model.add_to(app);
  add_options(app, translate::optimization_options(options), "Training");
  add_options(app, translate::validation_options(options), "Validation");
  flags.group.add_to(app, GroupFlags::Devices::kAny);
  add_client_security_flags(app, flags.security);
  add_options(app, translate::output_options(options), "Output");
}

void print_result(const translate::TrainingResult& result,
                  const translate::TrainingOptions& options, const Console& console) {
  console.print("trained %s, %s: %s\n", counted(result.epochs, "epoch").c_str(),
                counted(result.updates, "update").c_str(), result.stop_reason.c_str());
  console.print("best by %s: ", translate::to_string(options.valid_metrics.front()).c_str());
  if (!result.best) {
    console.print("not validated yet\n");
    return;
  }
  if (result.best->bleu && result.best->chrf)
    console.print("BLEU %.2f, chrF2 %.2f, ", *result.best->bleu, *result.best->chrf);
  console.print("loss %.4f, in %s/best\n", result.best->loss, options.model_dir.c_str());
}

// Bars, lines, traces and a rank's own files take part in no exchange.
const std::vector<std::string> kOwnFlags{"--quiet",         "--log-level",
                                         "--profile",       "--profile-skip",
                                         "--profile-steps", "--optimizer-state-dir"};

int run(TrainFlags& flags, const CLI::App& command) {
  auto& options = flags.options;
  if (flags.model.dim_vocabs.empty()) flags.model.dim_vocabs = translate::vocabulary_sizes(options);
  options.model = flags.model.resolve();
  options = translate::resolve(options);
  check_offload(options.cpu_offload, flags.group.computes_on_cpu(),
                translate::strategy_name(options));
  if (options.precision) nmt::check_precision(*options.precision, flags.group.computes_on_cpu());
  if (!options.servers) {
    ps::refuse_servers(translate::strategy_name(options));
    refuse_security(flags.security, "--strategy ps-sync or ps-async");
  }
  const auto group = flags.group.connect();
  check_same_flags(group, command, kOwnFlags);
  if (options.servers) {
    options.servers =
        ps::trainer_info_from_environment(group, options.servers->training, flags.security).session;
  }
  const auto result = translate::train(options, group);
  group.close();
  if (group.rank() == 0 && !options.quiet) {
    print_result(result, options, Console(0));
    print_summary(options, Console(0));
  }
  return result.was_asked_to ? kExitStopped : kExitOk;
}

}  // namespace

void add_train_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a translator on one or many ranks");
  auto flags = std::make_shared<TrainFlags>();
  add_flags(*command, *flags);
  command->callback([flags, command, &action] {
    // A budget of tokens or memory alone decides unless a number of sentences is asked for, too.
    CLI::Option* mini_batch = command->get_option("--mini-batch");
    if ((flags->options.mini_batch_words > 0 || flags->options.mini_batch_fit) &&
        mini_batch->count() == 0) {
      flags->options.mini_batch = 0;
      mini_batch->default_str("0");  // for --dump-config
    }
    action = [flags, command] { return run(*flags, *command); };
  });
}

}  // namespace cohort::cli
