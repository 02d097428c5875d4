// SPDX-License-Identifier: Apache-2.0
// Trains a CTR model on data in Criteo's format:  ctr train
// Through servers:  cohort run --servers 1 --trainers 2 -- ctr train --mode async
//
// docs/ctr.md has the tour.
#include <CLI/CLI.hpp>
#include <functional>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/group_flags.h"
#include "cohort/cli/parse.h"
#include "cohort/cli/profile_flags.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/module/session.h"
#include "cohort/ps/role.h"

#include "examples/ctr/click_generator.h"
#include "examples/ctr/interruption.h"
#include "examples/ctr/trainer.h"

namespace {

using cohort::kFile;
using cohort::kFolder;
using cohort::cli::above_zero;
using cohort::cli::zero_or_more;
using ctr::Options;

constexpr int64_t kLargestBatch = 1 << 20;  // Its examples alone fill 280 MB.
constexpr double kMaxMebibytes = 0x1p40;    // Bytes of more are no 64-bit number.

// Everything that the commands read their flags into.
struct Flags {
  Options options;
  ctr::GeneratorOptions generator;
  cohort::cli::GroupFlags group;
  std::string output;
  std::string input;
};

void add_data_flags(CLI::App& app, Options& o, const std::string& data) {
  app.add_option("--data", o.data, data)->type_name(kFolder)->capture_default_str();
  app.add_option("--test", o.test, "Files to evaluate on, instead of the folder's")
      ->type_name(kFile);
  app.add_option("--batch", o.batch_size, "Examples of a trainer in a step")
      ->check(cohort::cli::number_that(
          [](double n) { return n >= 1 && n <= static_cast<double>(kLargestBatch); },
          "1 to " + std::to_string(kLargestBatch)))
      ->capture_default_str();
  app.add_flag("--skip-damaged", o.skip_damaged, "Skip malformed lines, and count them");
}

void add_table_flags(CLI::App& app, ctr::TableLimits& limits) {
  constexpr const char* kTable = "Table";
  app.add_option("--table-memory-mib", limits.memory_mib,
                 "Memory of each server for rows (0, or without the flag: no limit)")
      ->type_name(cohort::kMebibytes)
      ->check(
          cohort::cli::number_that([](double n) { return n < kMaxMebibytes; }, "less than 2^40"))
      ->group(kTable);
  app.add_option("--at-cap", limits.at_cap,
                 "At the limit of --table-memory-mib: refuse new rows, evict the least used ones, "
                 "or spill rows to the disk (default: refuse)")
      ->check(cohort::cli::one_of({"refuse", "evict_least_used", "spill"}))
      ->group(kTable);
  CLI::Option* after = app.add_option("--admit-after", limits.admit_after,
                                      "Create a category's row only at its N-th push, 1 to 256")
                           ->group(kTable);
  app.add_option("--admit-probability", limits.admit_probability,
                 "Probability that a push creates the row of a category that has none")
      ->group(kTable)
      ->excludes(after);
  app.add_option("--row-ttl", limits.row_ttl_s,
                 "Evict rows that had no push for this time (0: never)")
      ->type_name(cohort::kSeconds)
      ->check(zero_or_more())
      ->group(kTable);
}

void add_training_flags(CLI::App& app, Options& o) {
  app.add_option("--train", o.train, "Files to train on, instead of the folder's")
      ->type_name(kFile);
  app.add_option(
         "--rows", o.rows,
         "Number of examples to generate if the folder has none; without it a folder named by "
         "--data must have them")
      ->check(above_zero())
      ->capture_default_str();
  app.add_option("--mode", o.mode,
                 "How trainers share updates (default: sync with servers, local without)")
      ->check(cohort::cli::one_of({"local", "sync", "async", "half-async", "geo"}));
  app.add_option("--epochs", o.epochs, "Passes over the data")
      ->check(above_zero())
      ->capture_default_str();
  app.add_option("--max-steps", o.max_steps, "Largest number of steps in an epoch (0: all)")
      ->check(zero_or_more())
      ->capture_default_str();
  app.add_option("--lr", o.learning_rate,
                 "Learning rate of the network (Adam), applied to each push; --mode async does not "
                 "divide it by the number of trainers")
      ->check(above_zero())
      ->capture_default_str();
  app.add_option("--row-lr", o.row_learning_rate,
                 "Learning rate of rows (row-wise Adagrad), applied to each push as --lr")
      ->check(above_zero())
      ->capture_default_str();
  app.add_option("--max-staleness", o.max_staleness,
                 "async: steps that a trainer may be ahead of the slowest one (-1: no limit)")
      ->check(cohort::cli::number_that([](double n) { return n >= -1; }, "-1 (any) or more"))
      ->capture_default_str();
  app.add_option("--max-merge", o.max_merge, "half-async: pushes summed into one")
      ->check(above_zero())
      ->default_str(std::to_string(cohort::ps::SessionOptions().max_merge));
  app.add_option("--geo-steps", o.geo_steps, "geo: local steps between two synchronisations")
      ->check(above_zero())
      ->default_str(std::to_string(cohort::ps::SessionOptions().geo_steps));
  app.add_option(
         "--precision", o.precision,
         "Type of the hidden layers' products in training; parameters and evaluation stay in "
         "float32")
      ->check(cohort::cli::one_of({"float32", "bfloat16"}))
      ->capture_default_str();
  app.add_option("--wire-dtype", o.wire_dtype,
                 "Type in which weights and gradients travel between trainers and servers")
      ->check(cohort::cli::one_of({"float32", "bfloat16"}))
      ->capture_default_str();
  app.add_option("--error-if-nonfinite", o.error_if_nonfinite,
                 "End the training at a gradient with a NaN or an infinity (false: apply it)")
      ->default_str("true");
  app.add_option("--seed", o.seed, "Random seed of parameters, rows and generated data")
      ->capture_default_str();
  app.add_option("-p,--print-freq", o.print_freq, "Steps between progress lines")
      ->check(above_zero())
      ->capture_default_str();
  app.add_option("--save", o.save, "Write a checkpoint here after each epoch")->type_name(kFolder);
  cohort::cli::add_profile_flags(app, o.profile, "Profile");
  add_table_flags(app, o.table);
}

void add_load_flag(CLI::App& app, Options& o, const std::string& what) {
  app.add_option("--load", o.load, what)->type_name(kFolder);
}

int generate(const Flags& flags) {
  const ctr::Truth truth = ctr::generate_clicks(flags.generator, flags.output);
  std::printf("%lld training and %lld test examples in %s\n",
              static_cast<long long>(truth.train.count), static_cast<long long>(truth.test.count),
              flags.output.c_str());
  if (truth.test.count == 0) {
    std::printf("no test examples, so no figures that can be attained on them\n");
    return cohort::kExitOk;
  }
  std::printf("attainable on the test examples: AUC %s, log-loss %.5f, %.4f clicks\n",
              ctr::auc_text(truth.test).c_str(), truth.test.log_loss,
              static_cast<double>(truth.test.clicks) / static_cast<double>(truth.test.count));
  return cohort::kExitOk;
}

// Joins the other trainers, does `work`, and leaves. Where a launcher restarts or drops single
// trainers, there is no process group: they work together through their servers alone.
int with_trainer(Flags& flags, const CLI::App& command,
                 const std::function<void(ctr::Trainer&)>& work) {
  const bool alone = cohort::env_string("COHORT_PROCESS_GROUP").value_or("") == "none";
  const auto group = alone ? flags.group.stay_alone() : flags.group.connect();
  if (group.size() > 1 && command.get_name() != "train")
    throw cohort::ConfigError("ctr " + command.get_name() + ": expected one process, got " +
                              std::to_string(group.size()));
  cohort::cli::check_same_flags(group, command,
                                {"--print-freq", "--profile", "--profile-skip", "--profile-steps"});
  ctr::Trainer trainer(flags.options, group);
  work(trainer);
  trainer.finish();
  group.close();
  return cohort::kExitOk;
}

int run(int argc, char** argv) {
  CLI::App app("A CTR model on data in Criteo's format, alone or through parameter servers", "ctr");
  app.require_subcommand(1);
  Flags flags;
  CLI::App* made =
      app.add_subcommand("generate", "Generates data whose best attainable AUC is known");
  made->add_option("--rows", flags.generator.rows, "Training examples")->capture_default_str();
  made->add_option("--test-rows", flags.generator.test_rows, "Test examples (default: a tenth)")
      ->check(zero_or_more());
  made->add_option("--seed", flags.generator.seed, "Random seed")->capture_default_str();
  made->add_option("--zipf", flags.generator.zipf, "Exponent of the categories' frequencies")
      ->capture_default_str();
  made->add_option("--output", flags.output, "Folder for train.tsv, test.tsv and truth.json")
      ->type_name(kFolder)
      ->required();
  made->add_flag("--overwrite", flags.generator.overwrite, "Replace these files");
  CLI::App* train = app.add_subcommand("train", "Trains, and evaluates after each epoch");
  add_data_flags(*train, flags.options,
                 "Folder with train.tsv and test.tsv; generated if they are not there");
  add_training_flags(*train, flags.options);
  add_load_flag(*train, flags.options, "local: start from this checkpoint");
  flags.group.add_to(*train, cohort::cli::GroupFlags::Devices::kAny);
  cohort::cli::add_client_security_flags(*train, flags.options.security);
  CLI::App* evaluate = app.add_subcommand("evaluate", "Prints AUC and log-loss of a checkpoint");
  add_data_flags(*evaluate, flags.options, "Folder with test.tsv");
  add_load_flag(*evaluate, flags.options, "The checkpoint");
  CLI::App* predict =
      app.add_subcommand("predict", "Writes the probability of a click for each line");
  predict->add_option("--input", flags.input, "File of lines, with labels or without")
      ->type_name(kFile)
      ->required();
  predict
      ->add_option("--output", flags.output, "File for a probability per line; -: standard output")
      ->type_name(kFile)
      ->required();
  add_load_flag(*predict, flags.options, "The checkpoint");
  for (CLI::App* command : {evaluate, predict}) command->get_option("--load")->required();
  if (const auto ended = cohort::cli::parse(app, argc, argv, "ctr --help lists commands and flags"))
    return *ended;
  if (*made) return generate(flags);
  flags.options.makes_data = train->count("--data") == 0 || train->count("--rows") > 0;
  if (*train && flags.options.mode == "local" && cohort::ps::role_from_environment()) {
    throw cohort::ConfigError(
        "--mode local: expected no parameter servers beside it, leave out --servers");
  }
  if (*train) return with_trainer(flags, *train, [](ctr::Trainer& trainer) { trainer.train(); });
  flags.options.mode = "local";
  if (*predict) {
    if (flags.output == "-") flags.output = "/dev/stdout";
    return with_trainer(flags, *predict,
                        [&](ctr::Trainer& trainer) { trainer.predict(flags.input, flags.output); });
  }
  return with_trainer(flags, *evaluate, [](ctr::Trainer& trainer) { trainer.print_evaluation(); });
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("ctr", [&] {
    try {
      return run(argc, argv);
    } catch (const ctr::Interrupted& interrupted) {
      return ctr::end_by(interrupted);
    }
  });
}
