// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/training_options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <set>

#include "cohort/base/error.h"
#include "cohort/comm/profile_options.h"
#include "cohort/ps/module/host_ranks.h"
#include "cohort/translate/precision.h"
#include "cohort/translate/updater.h"

namespace cohort::translate {
namespace {

constexpr std::array kLogLevels = {"debug", "info", "warn", "error"};

// A number and its unit, one of `units`: 5s, 500u.
struct Frequency {
  double count;
  char unit;
};

// Of "u" and "e" only whole numbers.
Frequency parse_frequency(const std::string& flag, const std::string& text,
                          const std::string& units, const std::string& expected) {
  char* end = nullptr;
  const double count = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const bool is_known = unit.size() == 1 && units.find(unit) != std::string::npos;
  const bool is_whole = count == std::floor(count);
  if (!is_known || !(count > 0 && count < 1e9) || (unit != "s" && !is_whole))
    throw ConfigError(flag + " " + text + ": expected a number with its unit, " + expected);
  return {count, unit.front()};
}

std::string to_text(double count, const char* unit) {
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.9g%s", count, unit);
  return digits.data();
}

TextValue valid_freq(TrainingOptions& o) {
  const auto get = [&o]() -> std::vector<std::string> {
    return {o.valid_freq_updates > 0 ? to_text(static_cast<double>(o.valid_freq_updates), "u")
                                     : to_text(static_cast<double>(o.valid_freq_epochs), "e")};
  };
  const auto set = [&o](const std::vector<std::string>& given) {
    const auto [count, unit] =
        parse_frequency("--valid-freq", given.front(), "eu", "500u (updates) or 1e (epochs)");
    o.valid_freq_updates = unit == 'u' ? static_cast<int64_t>(count) : 0;
    o.valid_freq_epochs = unit == 'e' ? static_cast<int64_t>(count) : 0;
  };
  return {{}, get, set};
}

TextValue disp_freq(TrainingOptions& o) {
  const auto get = [&o]() -> std::vector<std::string> {
    return {o.disp_freq_updates > 0 ? to_text(static_cast<double>(o.disp_freq_updates), "u")
                                    : to_text(o.disp_freq_s, "s")};
  };
  const auto set = [&o](const std::vector<std::string>& given) {
    const auto [count, unit] =
        parse_frequency("--disp-freq", given.front(), "us", "5s (seconds) or 500u (updates)");
    o.disp_freq_updates = unit == 'u' ? static_cast<int64_t>(count) : 0;
    o.disp_freq_s = count;
  };
  return {{}, get, set};
}

TextValue log_level(LogLevel& level) {
  const auto get = [&level]() -> std::vector<std::string> {
    return {kLogLevels.at(static_cast<size_t>(level))};
  };
  const auto set = [&level](const std::vector<std::string>& given) {
    level =
        static_cast<LogLevel>(std::ranges::find(kLogLevels, given.front()) - kLogLevels.begin());
  };
  return {{kLogLevels.begin(), kLogLevels.end()}, get, set};
}

TextValue strategy(TrainingOptions& o) {
  const auto get = [&o]() -> std::vector<std::string> { return {strategy_name(o)}; };
  const auto set = [&o](const std::vector<std::string>& given) {
    const auto servers = ps::server_training(given.front());
    o.strategy = parallel::parse_strategy(servers ? "ddp" : given.front());
    o.servers.reset();
    if (servers) o.servers = ps::SessionOptions{.training = *servers};
  };
  return {{"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "ps-sync", "ps-async"}, get, set};
}

// What makes no sense where servers have the optimizer.
void check_servers(const TrainingOptions& options) {
  if (!options.servers) return;
  const std::string with = ": expected none with --strategy " + strategy_name(options);
  if (options.tensor_parallel > 1) throw ConfigError("--tensor-parallel" + with);
  if (!options.optimizer_state_dir.empty()) throw ConfigError("--optimizer-state-dir" + with);
  if (is_async(options.servers) && options.exponential_smoothing > 0) {
    throw ConfigError("--exponential-smoothing" + with +
                      ": each trainer would have an average of its own");
  }
}

void check_optimizer_params(const std::array<double, 3>& params) {
  const auto [beta1, beta2, epsilon] = params;
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  if (is_beta(beta1) && is_beta(beta2) && epsilon > 0) return;
  throw ConfigError("--optimizer-params " + to_text(beta1, " ") + to_text(beta2, " ") +
                    to_text(epsilon, "") +
                    ": expected beta1 and beta2 of 0 to below 1, and epsilon above 0");
}

void check_valid_metrics(const std::vector<ValidMetric>& metrics) {
  if (std::set(metrics.begin(), metrics.end()).size() == metrics.size() && !metrics.empty()) return;
  std::string text;
  for (const ValidMetric metric : metrics) text += " " + to_string(metric);
  throw ConfigError("--valid-metrics" + text + ": expected each of them once");
}

Options stop_and_save_options(TrainingOptions& o) {
  return {
      {"--after-epochs", &o.after_epochs, "Stop after this many epochs (0: no limit)",
       rule(kZeroOrMore, kEpochs)},
      {"--after-batches", &o.after_batches, "Stop after this many updates (0: no limit)",
       rule(kZeroOrMore, kUpdates)},
      {"--time-limit", &o.time_limit_min, "Stop after this many minutes (0: no limit)",
       rule(kZeroOrMore, kMinutes)},
      {"--save-freq", &o.save_freq_min,
       "Time between saves of what is needed to resume (0: only at the end)",
       rule(kZeroOrMore, kMinutes)},
      {"--save-interval-updates", &o.save_interval_updates,
       "Updates between copies of the weights in checkpoints/, for `cohort nmt average` (0: none)",
       rule(kZeroOrMore, kUpdates)},
      {"--keep-interval-updates", &o.keep_interval_updates,
       "Number of these copies to keep, the newest (0: all)", rule(kZeroOrMore)},
  };
}

}  // namespace

std::string strategy_name(const TrainingOptions& options) {
  if (!options.servers) return parallel::to_string(options.strategy);
  return is_async(options.servers) ? "ps-async" : "ps-sync";
}

TrainingOptions resolve(TrainingOptions options) {
  check_servers(options);
  check_optimizer_params(options.optimizer_params);
  check_valid_metrics(options.valid_metrics);
  if (options.mini_batch == 0 && options.mini_batch_words == 0 && !options.mini_batch_fit) {
    throw ConfigError(
        "--mini-batch 0 and --mini-batch-words 0: expected one of them above 0, or "
        "--mini-batch-fit");
  }
  if (options.keep_interval_updates > 0 && options.save_interval_updates == 0) {
    throw ConfigError("--keep-interval-updates " + std::to_string(options.keep_interval_updates) +
                      ": expected --save-interval-updates with it, which keeps weights");
  }
  options.evaluation.translate = std::ranges::any_of(options.valid_metrics, needs_translations);
  if (options.learn_rate) {
    // The peak of the schedule is factor * (width * warmup)^-0.5.
    options.noam_factor =
        *options.learn_rate * std::sqrt(static_cast<double>(options.model.dim_emb) *
                                        static_cast<double>(options.lr_warmup));
  }
  return options;
}

Options text_options(TrainingOptions& o) {
  return {
      {"--train-sets",
       &o.train_sets,
       "Source and target text, or one .tsv or .json file",
       {.unit = kFile, .max_values = 2, .required = true}},
      {"--vocabs",
       &o.vocabs,
       "Source and target .spm file; trained on --train-sets if absent (default: in --model-dir)",
       {.unit = kFile, .min_values = 2, .max_values = 2}},
      {"--joined-dictionary", &o.joined_dictionary,
       "One vocabulary for both sides, trained on both; so does --vocabs with the same file twice"},
      {"--sentencepiece-max-lines", &o.sentencepiece_max_lines,
       "Train vocabularies on a sample of this many pairs at most", rule(kAboveZero, "PAIRS")},
      {"--model-dir", &o.model_dir, "The run's folder", {.unit = kFolder, .required = true}},
      {"--cache-dir", &o.cache_dir,
       "Folder of the tokenised text, which several runs may share (default: in --model-dir)",
       rule(kFolder)},
      {"--max-length", &o.max_length, "Drop training pairs with a longer side",
       rule(kAboveZero, kTokens)},
      {"--max-length-crop", &o.max_length_crop, "Truncate longer sides to --max-length instead"},
  };
}

Options data_options(TrainingOptions& o) {
  Options options = text_options(o);
  options.push_back({"--valid-sets",
                     &o.valid_sets,
                     "Validation text, in the same forms",
                     {.unit = kFile, .max_values = 2, .required = true}});
  options.push_back({"--overwrite", &o.overwrite,
                     "Replace an earlier run in --model-dir; without it, that run resumes"});
  return options;
}

// Rates beyond these make no sense: parameters are of the order of 1.
Options optimization_options(TrainingOptions& o) {
  Options options = {
      {"--gradient-checkpointing", &o.gradient_checkpointing,
       "Keep only the inputs of layers and compute the rest again in backward: less memory, more "
       "time, the same numbers"},
      {"--strategy", strategy(o),
       "What of the model each rank holds: all (ddp), a share of the optimizer's state (zero1), of "
       "gradients too (zero2), of parameters too (zero3 or fsdp), the last within each host "
       "(hybrid); or parameter servers, synchronous or asynchronous (ps-sync, ps-async)"},
      {"--tensor-parallel", &o.tensor_parallel,
       "Ranks that compute one model together, each with a part of every matrix; a divisor of the "
       "number of ranks, of --transformer-heads and of --transformer-dim-ffn",
       rule(Limits{[](double n) { return n >= 1 && n <= 1 << 16; }, "1 to 65536"})},
      {"--cpu-offload", &o.cpu_offload,
       "Shards and optimizer in host memory, for a model on a GPU"},
      {"--optimizer-state-dir", &o.optimizer_state_dir,
       "Folder of a file with Adam's moments, which is mapped into memory: for moments that do not "
       "fit into memory",
       rule(kFolder)},
      {"--optimizer-params", &o.optimizer_params, "Adam's beta1, beta2 and epsilon", rule("X")},
      {"--precision",
       precision_value(o.precision, {"auto", "bfloat16", "float32"}),
       "Precision of matrix products",
       {.shown_default = "auto"}},
      {"--mini-batch", &o.mini_batch, "Sentences per rank and batch (0: no limit)",
       rule(kZeroOrMore)},
      {"--mini-batch-words", &o.mini_batch_words,
       "Target tokens per rank and batch, padding included (0: no limit)",
       rule(kZeroOrMore, kTokens)},
      {"--mini-batch-fit", &o.mini_batch_fit,
       "Use the largest batches that fit into --workspace, found by trial at the start"},
      {"--workspace",
       &o.workspace_mib,
       "Memory for the tensors of a rank's batch, with --mini-batch-fit; parameters, gradients and "
       "Adam's moments are not counted",
       {.unit = kMebibytes,
        .limits = {[](double n) { return n >= 1 && n <= 1 << 24; }, "1 to 16777216"},
        .needs = "--mini-batch-fit"}},
      {"--maxi-batch", &o.maxi_batch, "Sort by length within windows of this many batches",
       rule(kAboveZero)},
      {"--optimizer-delay", &o.optimizer_delay, "Batches per update and rank", rule(kAboveZero)},
      {"--noam-factor", &o.noam_factor, "Factor of the Noam schedule",
       rule(Limits{[](double n) { return n > 0 && n <= 1e6; },
                   "a number above 0 and at most 1000000"})},
      {"--lr-warmup", &o.lr_warmup, "Updates of linear rise", rule(kAboveZero, kUpdates)},
      {"--learn-rate",
       &o.learn_rate,
       "Highest learning rate, at the end of --lr-warmup; sets --noam-factor",
       {.unit = "X",
        .limits = {[](double n) { return n > 0 && n <= 100; }, "a number above 0 and at most 100"},
        .excludes = "--noam-factor"}},
      {"--clip-norm", &o.clip_norm, "Largest gradient norm (0: no clipping)", rule(kZeroOrMore)},
      {"--exponential-smoothing", &o.exponential_smoothing,
       "Validate and save a moving average of the parameters, in which the newest have this weight "
       "(0: no average)",
       rule(Limits{[](double n) { return n >= 0 && n <= 0.5; }, "0 to 0.5"})},
      {"--seed", &o.seed, "Random seed of parameters, data order and dropout", rule(kWholeNumber)},
  };
  std::ranges::move(stop_and_save_options(o), std::back_inserter(options));
  return options;
}

Options validation_options(TrainingOptions& o) {
  Options options = {
      {"--early-stopping", &o.early_stopping,
       "Stop after this many validations in a row without a new best (0: never)",
       rule(kZeroOrMore)},
      {"--valid-freq", valid_freq(o), "Validate every 1e (epoch), 500u (updates), ...",
       rule("FREQ")},
      {"--valid-metrics",
       words_for(o.valid_metrics, {"bleu", "chrf", "ce-mean-words"}, parse_valid_metric),
       "Metrics of a validation. The first decides which weights are best, and --early-stopping; "
       "without bleu and chrf nothing is translated",
       {.max_values = 3}},
      {"--valid-on-start", &o.valid_on_start, "Validate before the first update, too"},
  };
  std::ranges::move(evaluation_options(o.evaluation), std::back_inserter(options));
  return options;
}

Options evaluation_options(EvaluationOptions& o) {
  Options options = {
      {"--tokenize",
       words_for(o.bleu.tokenizer, {"13a", "intl", "zh", "char", "none"},
                 text::parse_bleu_tokenizer),
       "sacreBLEU's tokenizer: 13a for languages with spaces, zh for Chinese"},
      {"--valid-mini-batch-words", &o.mini_batch_words, "Tokens of a batch, padding included",
       rule(kAboveZero, kTokens)},
  };
  std::ranges::move(search_options(o.search), std::back_inserter(options));
  return options;
}

Options search_options(nmt::SearchOptions& o) {
  return {
      {"--beam-size", &o.beam_size, "Width of the beam; 1 is greedy search",
       rule(Limits{[](double n) { return n >= 1 && n <= 1000; }, "1 to 1000"})},
      {"--normalize", &o.normalize, "Compare translations by log p / length^X", rule(kFinite)},
      {"--word-penalty", &o.word_penalty,
       "Subtract X times the length from a score; a value below 0 favours long translations",
       rule(kFinite)},
      {"--allow-unk", &o.allow_unk, "Allow the unknown token in translations"},
      {"--max-length-factor", &o.max_length_factor,
       "Limit the length of a translation to X times the source's tokens, plus 10",
       rule(kAboveZero)},
      {"--min-output-length", &o.min_length,
       "Translations have at least this many tokens, as far as the longest length allows",
       rule(kWholeNumber, kTokens)},
      {"--max-output-length", &o.max_length, "Translations have at most this many tokens",
       rule(kAboveZero, kTokens)},
  };
}

Options output_options(TrainingOptions& o) {
  Options options = {
      {"--disp-freq", disp_freq(o),
       "Write figures of training to the run's record every 5s (seconds), 500u (updates), ...",
       rule("FREQ")},
      {"--quiet", &o.quiet, "No progress bars or lines, and no summary at the end"},
      {"--log-level", log_level(o.log_level), "Lowest level that is logged"},
  };
  std::ranges::move(profile_options(o.profile), std::back_inserter(options));
  return options;
}

}  // namespace cohort::translate
