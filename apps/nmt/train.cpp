// `cohort nmt train`: flags, wiring and the last lines.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cohort/base/console.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/train/progress.h"
#include "cohort/translate/report.h"
#include "cohort/translate/training.h"

#include "cohort/cli/group_flags.h"
#include "apps/nmt/commands.h"
#include "apps/nmt/evaluation_flags.h"
#include "apps/nmt/model_flags.h"
#include "apps/nmt/text_flags.h"
#include "cohort/cli/offload_flag.h"
#include "cohort/cli/parse.h"
#include "cohort/cli/profile_flags.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/module/host_ranks.h"

namespace cohort::cli {
namespace {

struct TrainFlags {
  translate::TrainingOptions options;
  ModelFlags model;
  GroupFlags group;
  ps::SecurityOptions security;
  EvaluationFlags evaluation{validation_search()};
  std::string strategy = "ddp";
  std::string precision = "auto";
  std::string valid_freq = "1e";
  std::string disp_freq = "5s";
  std::string log_level = "info";
  std::vector<std::string> valid_metrics = {"bleu", "chrf", "ce-mean-words"};
};

// "500u" is every 500 updates, "2e" every 2 epochs.
void parse_valid_freq(const std::string& text, translate::TrainingOptions& options) {
  char* end = nullptr;
  const long long count = std::strtoll(text.c_str(), &end, 10);
  const std::string unit = end;
  if (count < 1 || (unit != "u" && unit != "e")) {
    throw ConfigError("--valid-freq " + text +
                      ": expected a number with its unit, 500u (updates) or 1e (epochs)");
  }
  options.valid_freq_updates = unit == "u" ? count : 0;
  options.valid_freq_epochs = unit == "e" ? count : 0;
}

// "500u" is every 500 updates, "5s" every 5 seconds.
void parse_disp_freq(const std::string& text, translate::TrainingOptions& options) {
  char* end = nullptr;
  const double count = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const bool whole = count == std::floor(count);
  if (!(count > 0 && count < 1e9) || (unit != "s" && (unit != "u" || !whole))) {
    throw ConfigError("--disp-freq " + text +
                      ": expected a number with its unit, 5s (seconds) or 500u (updates)");
  }
  options.disp_freq_updates = unit == "u" ? static_cast<int64_t>(count) : 0;
  options.disp_freq_s = count;
}

std::vector<translate::ValidMetric> parse_valid_metrics(const std::vector<std::string>& names) {
  std::vector<translate::ValidMetric> metrics;
  std::string text;
  for (const std::string& name : names) {
    metrics.push_back(translate::parse_valid_metric(name));
    text += " " + name;
  }
  if (std::set(names.begin(), names.end()).size() < names.size())
    throw ConfigError("--valid-metrics" + text + ": expected each of them once");
  return metrics;
}

LogLevel parse_log_level(const std::string& text) {
  constexpr std::array kNames = {"debug", "info", "warn", "error"};
  const auto found = std::find(kNames.begin(), kNames.end(), text);
  if (found == kNames.end())
    throw ConfigError("--log-level " + text + ": expected debug, info, warn or error");
  return static_cast<LogLevel>(found - kNames.begin());
}

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

// Beyond these no schedule is meant: parameters are of the order of 1.
CLI::Validator learning_rate() {
  return number_that([](double n) { return n > 0 && n <= 100; },
                     "a number above 0 and at most 100");
}
CLI::Validator rate_factor() {
  return number_that([](double n) { return n > 0 && n <= 1e6; },
                     "a number above 0 and at most 1000000");
}

constexpr const char* kData = "Data";
constexpr const char* kTraining = "Training";
constexpr const char* kValidation = "Validation";
constexpr const char* kOutput = "Output";

// Adds options whose defaults help shows, all to one of its groups.
auto options_of(CLI::App& app, const char* group) {
  return [&app, group](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str()->group(group);
  };
}

void add_run_flags(CLI::App& app, translate::TrainingOptions& o) {
  add_text_flags(app, o);
  app.add_option("--valid-sets", o.valid_sets, "The same for validation")
      ->type_name(kFile)
      ->required()
      ->expected(1, 2)
      ->group(kData);
  app.add_flag("--overwrite", o.overwrite,
               "Replace an earlier run in --model-dir; without it, that run goes on")
      ->group(kData);
}

void add_batch_flags(CLI::App& app, TrainFlags& flags) {
  auto& o = flags.options;
  const auto add = options_of(app, kTraining);
  app.add_flag("--gradient-checkpointing", o.gradient_checkpointing,
               "Keep only the inputs of layers and compute the rest again in backward: less "
               "memory, more time, the same numbers")
      ->group(kTraining);
  add("--strategy", flags.strategy,
      "What of the model each rank holds: all (ddp), a share of the optimizer's state (zero1), of "
      "gradients too (zero2), of parameters too (zero3 or fsdp), the last within each host "
      "(hybrid); or through parameter servers, in step or each at once (ps-sync, ps-async)")
      ->check(one_of({"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "ps-sync", "ps-async"}));
  add("--tensor-parallel", o.tensor_parallel,
      "Ranks that compute one model together, each with a part of every matrix; a divisor of the "
      "number of ranks, of --transformer-heads and of --transformer-dim-ffn")
      ->check(CLI::Range(1, 1 << 16));
  add_offload_flag(app, o.cpu_offload)->group(kTraining);
  app.add_option("--optimizer-state-dir", o.optimizer_state_dir,
                 "Folder on a disk where Adam's moments lie, mapped into memory: for a model whose "
                 "moments do not fit there")
      ->type_name(kFolder)
      ->group(kTraining);
  add("--precision", flags.precision, "Of matrix products")
      ->check(one_of({"auto", "bfloat16", "float32"}));
  add("--mini-batch", o.mini_batch, "Sentences per rank and batch (0: no limit)")
      ->check(zero_or_more());
  add("--mini-batch-words", o.mini_batch_words,
      "Target tokens per rank and batch, padding included (0: no limit)")
      ->type_name(kTokens)
      ->check(zero_or_more());
  app.add_flag("--mini-batch-fit", o.mini_batch_fit,
               "Batches as large as --workspace lets them be, found by trial at the start")
      ->group(kTraining);
  add("--workspace", o.workspace_mib,
      "For the tensors of a rank's batch, with --mini-batch-fit: beside parameters, gradients and "
      "Adam's moments, or this rank's shards of them")
      ->type_name(kMebibytes)
      ->needs("--mini-batch-fit")
      ->check(CLI::Range(1, 1 << 24));
  add("--maxi-batch", o.maxi_batch, "Sort by length within windows of so many batches")
      ->check(above_zero());
  add("--optimizer-delay", o.optimizer_delay, "Batches per update and rank")->check(above_zero());
}

void add_schedule_flags(CLI::App& app, translate::TrainingOptions& o) {
  const auto add = options_of(app, kTraining);
  add("--noam-factor", o.noam_factor, "Factor of the Noam schedule")->check(rate_factor());
  add("--lr-warmup", o.lr_warmup, "Updates of linear rise")
      ->type_name(kUpdates)
      ->check(above_zero());
  app.add_option("--learn-rate",
                 "Highest learning rate, at the end of --lr-warmup; sets --noam-factor")
      ->type_name("X")
      ->check(learning_rate())
      ->excludes("--noam-factor")
      ->group(kTraining);
  add("--clip-norm", o.clip_norm, "Largest gradient norm (0: no clipping)")->check(zero_or_more());
  add("--exponential-smoothing", o.exponential_smoothing,
      "Validate and save a moving average of the parameters with this weight of the newest (0: do "
      "not)")
      ->check(CLI::Range(0.0, 0.5));
  add("--seed", o.seed, "Of parameters, data order and dropout")->check(whole_number());
}

void add_stopping_flags(CLI::App& app, translate::TrainingOptions& o) {
  const auto add = options_of(app, kTraining);
  add("--after-epochs", o.after_epochs, "Stop after so many epochs (0: no limit)")
      ->type_name(kEpochs)
      ->check(zero_or_more());
  add("--after-batches", o.after_batches, "Stop after so many updates (0: no limit)")
      ->type_name(kUpdates)
      ->check(zero_or_more());
  add("--time-limit", o.time_limit_min, "Stop after so many minutes (0: no limit)")
      ->type_name(kMinutes)
      ->check(zero_or_more());
}

void add_validation_flags(CLI::App& app, TrainFlags& flags) {
  const auto add = options_of(app, kValidation);
  add("--early-stopping", flags.options.early_stopping,
      "Stop after so many validations in a row without a new best (0: never)")
      ->check(zero_or_more());
  add("--valid-freq", flags.valid_freq, "Validate every 1e (epoch), 500u (updates), ...")
      ->type_name("FREQ");
  add("--valid-metrics", flags.valid_metrics,
      "The first decides what is best, and --early-stopping; without bleu and chrf nothing is "
      "translated")
      ->check(one_of({"bleu", "chrf", "ce-mean-words"}))
      ->expected(1, 3);
  app.add_flag("--valid-on-start", flags.options.valid_on_start,
               "Validate before the first update, too")
      ->group(kValidation);
  flags.evaluation.add_to(app, kValidation);
}

void add_checkpoint_flags(CLI::App& app, translate::TrainingOptions& o) {
  const auto add = options_of(app, kTraining);
  add("--save-freq", o.save_freq_min,
      "Save what is needed to go on every so many minutes (0: only at the end)")
      ->type_name(kMinutes)
      ->check(zero_or_more());
  add("--save-interval-updates", o.save_interval_updates,
      "Keep the weights of every so many updates in checkpoints/, to be averaged (0: none)")
      ->type_name(kUpdates)
      ->check(zero_or_more());
  add("--keep-interval-updates", o.keep_interval_updates,
      "Of those, keep the newest so many (0: all)")
      ->check(zero_or_more());
}

void add_output_flags(CLI::App& app, TrainFlags& flags) {
  const auto add = options_of(app, kOutput);
  add("--disp-freq", flags.disp_freq,
      "A line about training in the run's record every 5s (seconds), 500u (updates), ...")
      ->type_name("FREQ");
  app.add_flag("--quiet", flags.options.quiet,
               "No progress bars or lines, and no summary at the end")
      ->group(kOutput);
  add("--log-level", flags.log_level, "Least level that is logged")
      ->check(one_of({"debug", "info", "warn", "error"}));
  add_profile_flags(app, flags.options.profile, kOutput);
}

void add_flags(CLI::App& app, TrainFlags& flags) {
  add_run_flags(app, flags.options);
  flags.model.add_to(app);
  add_batch_flags(app, flags);
  add_schedule_flags(app, flags.options);
  add_stopping_flags(app, flags.options);
  add_validation_flags(app, flags);
  add_checkpoint_flags(app, flags.options);
  flags.group.add_to(app);
  add_client_security_flags(app, flags.security);
  add_output_flags(app, flags);
}

void print_result(const translate::TrainingResult& result,
                  const translate::TrainingOptions& options, const Console& console) {
  console.print("trained %lld epochs, %lld updates: %s\n", static_cast<long long>(result.epochs),
                static_cast<long long>(result.updates), result.stop_reason.c_str());
  console.print("best by %s: ", translate::to_string(options.valid_metrics.front()).c_str());
  if (!result.best) {
    console.print("not validated yet\n");
    return;
  }
  if (result.best->bleu && result.best->chrf)
    console.print("BLEU %.2f, chrF2 %.2f, ", *result.best->bleu, *result.best->chrf);
  console.print("loss %.4f, in %s/best\n", result.best->loss, options.model_dir.c_str());
}

// Flags that are good each by itself.
void check_together(const TrainFlags& flags) {
  const auto& options = flags.options;
  refuse_offload(options.cpu_offload);
  if (options.mini_batch == 0 && options.mini_batch_words == 0 && !options.mini_batch_fit) {
    throw ConfigError(
        "--mini-batch 0 and --mini-batch-words 0: expected one of them above 0, or "
        "--mini-batch-fit");
  }
  if (options.keep_interval_updates > 0 && options.save_interval_updates == 0) {
    throw ConfigError("--keep-interval-updates " + std::to_string(options.keep_interval_updates) +
                      ": expected --save-interval-updates with it, which keeps weights");
  }
  if (!ps::server_training(flags.strategy)) {
    ps::refuse_servers(flags.strategy);
    refuse_security(flags.security, "--strategy ps-sync or ps-async");
  }
}

int run(TrainFlags& flags, const CLI::App& app) {
  auto& options = flags.options;
  options.model = flags.model.resolve();
  options.precision = nmt::parse_precision(flags.precision);
  const auto servers = ps::server_training(flags.strategy);
  options.strategy = parallel::parse_strategy(servers ? "ddp" : flags.strategy);
  check_together(flags);
  options.evaluation = flags.evaluation.resolve();
  parse_valid_freq(flags.valid_freq, options);
  parse_disp_freq(flags.disp_freq, options);
  options.log_level = parse_log_level(flags.log_level);
  options.valid_metrics = parse_valid_metrics(flags.valid_metrics);
  options.evaluation.translate =
      std::ranges::any_of(options.valid_metrics, translate::needs_translations);
  if (const auto* rate = app.get_option("--learn-rate"); rate->count() > 0) {
    // The peak of the schedule is factor * (width * warmup)^-0.5.
    options.noam_factor =
        rate->as<double>() * std::sqrt(static_cast<double>(options.model.dim_emb) *
                                       static_cast<double>(options.lr_warmup));
  }
  const auto group = flags.group.connect();
  if (servers)
    options.servers = ps::trainer_info_from_environment(group, *servers, flags.security).session;
  const auto result = translate::train(options, group);
  group.close();
  print_result(result, options, Console(group.rank()));
  if (group.rank() == 0 && !options.quiet) print_summary(options, Console(0));
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
