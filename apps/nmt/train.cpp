// `cohort nmt train`: flags, wiring and the last lines.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "cohort/base/console.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/translate/training.h"

#include "apps/group_flags.h"
#include "apps/nmt/commands.h"
#include "apps/nmt/evaluation_flags.h"
#include "apps/nmt/model_flags.h"
#include "apps/parse.h"

namespace cohort::apps {
namespace {

struct TrainFlags {
  translate::TrainingOptions options;
  ModelFlags model;
  GroupFlags group;
  EvaluationFlags evaluation{validation_search()};
  std::string precision = "auto";
  std::string valid_freq = "1e";
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

void add_flags(CLI::App& app, TrainFlags& flags) {
  auto& o = flags.options;
  app.add_option("--train-sets", o.train_sets, "Source and target text, or one .tsv or .json file")
      ->required()
      ->expected(1, 2)
      ->group("Data");
  app.add_option("--valid-sets", o.valid_sets, "The same for validation")
      ->required()
      ->expected(1, 2)
      ->group("Data");
  app.add_option("--vocabs", o.vocabs,
                 "Source and target .spm file; trained on --train-sets if absent "
                 "(default: in --model-dir)")
      ->expected(2)
      ->group("Data");
  app.add_option("--model-dir", o.model_dir, "The run's folder")->required()->group("Data");
  app.add_flag("--overwrite", o.overwrite,
               "Replace an earlier run in --model-dir; without it, that run goes on")
      ->group("Data");
  app.add_option("--max-length", o.max_length, "Drop training pairs with more tokens on a side")
      ->capture_default_str()
      ->check(above_zero())
      ->group("Data");
  flags.model.add_to(app);
  app.add_option("--precision", flags.precision, "Of matrix products: auto, bfloat16 or float32")
      ->capture_default_str()
      ->group("Training");
  app.add_option("--mini-batch", o.mini_batch, "Sentences per rank and batch (0: no limit)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--mini-batch-words", o.mini_batch_words,
                 "Tokens per rank and batch, padding included (0: no limit)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--maxi-batch", o.maxi_batch, "Sort by length within windows of so many batches")
      ->capture_default_str()
      ->check(above_zero())
      ->group("Training");
  app.add_option("--optimizer-delay", o.optimizer_delay, "Batches per update and rank")
      ->capture_default_str()
      ->check(above_zero())
      ->group("Training");
  app.add_option("--noam-factor", o.noam_factor, "Factor of the Noam schedule")
      ->capture_default_str()
      ->check(above_zero())
      ->group("Training");
  app.add_option("--lr-warmup", o.lr_warmup, "Updates of linear rise")
      ->capture_default_str()
      ->check(above_zero())
      ->group("Training");
  app.add_option("--learn-rate",
                 "Highest learning rate, at the end of --lr-warmup; sets --noam-factor")
      ->check(above_zero())
      ->group("Training");
  app.add_option("--clip-norm", o.clip_norm, "Largest gradient norm (0: no clipping)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--exponential-smoothing", o.exponential_smoothing,
                 "Validate and save a moving average of the parameters with this weight of the "
                 "newest (0: do not)")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 0.5))
      ->group("Training");
  app.add_option("--seed", o.seed, "Of parameters, data order and dropout")
      ->check(whole_number())
      ->capture_default_str()
      ->group("Training");
  app.add_option("--after-epochs", o.after_epochs, "Stop after so many epochs (0: no limit)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--after-batches", o.after_batches, "Stop after so many updates (0: no limit)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--time-limit", o.time_limit_min, "Stop after so many minutes (0: no limit)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--early-stopping", o.early_stopping,
                 "Stop after so many validations in a row without a new best (0: never)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Validation");
  app.add_option("--valid-freq", flags.valid_freq, "Validate every 1e (epoch), 500u (updates), ...")
      ->capture_default_str()
      ->group("Validation");
  app.add_option("--valid-metrics", flags.valid_metrics,
                 "The first decides what is best, and --early-stopping: bleu, chrf, ce-mean-words; "
                 "without the first two nothing is translated")
      ->capture_default_str()
      ->expected(1, 3)
      ->group("Validation");
  app.add_flag("--valid-on-start", o.valid_on_start, "Validate before the first update, too")
      ->group("Validation");
  flags.evaluation.add_to(app, "Validation");
  app.add_option("--save-freq", o.save_freq_min,
                 "Save what is needed to go on every so many minutes (0: only at the end)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option(
         "--save-interval-updates", o.save_interval_updates,
         "Keep the weights of every so many updates in checkpoints/, to be averaged (0: none)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  app.add_option("--keep-interval-updates", o.keep_interval_updates,
                 "Of those, keep the newest so many (0: all)")
      ->capture_default_str()
      ->check(zero_or_more())
      ->group("Training");
  flags.group.add_to(app);
  app.add_flag("--quiet", o.quiet, "No progress bar");
}

void print_result(const translate::TrainingResult& result, const translate::TrainingOptions& options,
                  const Console& console) {
  console.print("trained %lld epochs, %lld updates: %s\n", static_cast<long long>(result.epochs),
                static_cast<long long>(result.updates), result.stop_reason.c_str());
  console.print("best by %s: ", translate::to_string(options.valid_metrics.front()).c_str());
  if (options.evaluation.translate)
    console.print("BLEU %.2f, chrF2 %.2f, ", result.best.bleu, result.best.chrf);
  console.print("loss %.4f, in %s/best\n", result.best.loss, options.model_dir.c_str());
}

int run(TrainFlags& flags, const CLI::App& app) {
  auto& options = flags.options;
  options.model = flags.model.resolve();
  options.precision = nmt::parse_precision(flags.precision);
  options.evaluation = flags.evaluation.resolve();
  parse_valid_freq(flags.valid_freq, options);
  options.valid_metrics.clear();
  for (const auto& name : flags.valid_metrics)
    options.valid_metrics.push_back(translate::parse_valid_metric(name));
  options.evaluation.translate =
      std::ranges::any_of(options.valid_metrics, translate::needs_translations);
  if (const auto* rate = app.get_option("--learn-rate"); rate->count() > 0) {
    if (app.get_option("--noam-factor")->count() > 0) {
      throw ConfigError("--learn-rate and --noam-factor: give one of them");
    }
    // The peak of the schedule is factor * (width * warmup)^-0.5.
    options.noam_factor =
        rate->as<double>() * std::sqrt(static_cast<double>(options.model.dim_emb) *
                                       static_cast<double>(options.lr_warmup));
  }
  if (options.mini_batch == 0 && options.mini_batch_words == 0) {
    throw ConfigError("--mini-batch 0 and --mini-batch-words 0: expected one of them above 0");
  }
  // A token budget alone decides unless a number of sentences is asked for, too.
  if (options.mini_batch_words > 0 && app.get_option("--mini-batch")->count() == 0)
    options.mini_batch = 0;
  const auto group = flags.group.connect();
  const auto result = translate::train(options, *group);
  group->close();
  print_result(result, options, Console(group->rank()));
  return result.was_asked_to ? kExitStopped : kExitOk;
}

}  // namespace

void add_train_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a translator on one or many ranks");
  auto flags = std::make_shared<TrainFlags>();
  add_flags(*command, *flags);
  command->callback(
      [flags, command, &action] { action = [flags, command] { return run(*flags, *command); }; });
}

}  // namespace cohort::apps
