// SPDX-License-Identifier: Apache-2.0
// What a run is told: the struct, and the one table of it that flags, help and config.json come from.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/base/option.h"
#include "cohort/comm/profiler.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/strategy.h"
#include "cohort/ps/module/session.h"
#include "cohort/translate/evaluation.h"
#include "cohort/translate/valid_metric.h"

namespace cohort::translate {

/// Options of a run. Those without a comment are explained by their help, in training_options.cpp.
struct TrainingOptions {
  std::vector<std::filesystem::path> train_sets;  ///< One or two files, see for_each_pair.
  std::vector<std::filesystem::path> valid_sets;  ///< Likewise.
  /// Two .spm files; made if absent; empty: in model_dir.
  std::vector<std::filesystem::path> vocabs;
  bool joined_dictionary = false;
  int64_t sentencepiece_max_lines = 2'000'000;
  std::string model_dir;
  std::string cache_dir;  ///< Empty: model_dir.
  bool overwrite = false;

  nmt::TransformerOptions model;
  /// None: agreed_precision's. What runs has one.
  std::optional<nmt::Precision> precision = nmt::Precision::kFloat32;
  parallel::Strategy strategy = parallel::Strategy::kDdp;
  /// Through parameter servers instead, strategy ps-sync or ps-async: UpdaterOptions::servers.
  std::optional<ps::SessionOptions> servers;
  int64_t tensor_parallel = 1;          ///< See parallel/mesh.h.
  bool gradient_checkpointing = false;  ///< See layer_runner.h.
  bool cpu_offload = false;             ///< parallel::ShardingOptions::cpu_offload.
  std::string optimizer_state_dir;      ///< optim::AdamOptions::state_folder.
  std::array<double, 3> optimizer_params = {0.9, 0.98, 1e-9};

  int64_t mini_batch = 64;
  int64_t mini_batch_words = 0;
  bool mini_batch_fit = false;
  int64_t workspace_mib = 2048;
  int64_t maxi_batch = 1000;
  int64_t max_length = 100;
  bool max_length_crop = false;
  int64_t optimizer_delay = 1;

  double noam_factor = 1;
  std::optional<double> learn_rate;
  int64_t lr_warmup = 4000;
  double clip_norm = 1;
  double exponential_smoothing = 0;
  uint64_t seed = 1;

  int64_t after_epochs = 0;
  int64_t after_batches = 0;
  double time_limit_min = 0;  ///< Of training and validation.
  std::vector<ValidMetric> valid_metrics = {ValidMetric::kBleu, ValidMetric::kChrf,
                                            ValidMetric::kLoss};
  int64_t early_stopping = 10;
  bool valid_on_start = false;
  int64_t valid_freq_epochs = 1;   ///< Validate every this many epochs (0: not) ...
  int64_t valid_freq_updates = 0;  ///< ... and every this many updates (0: not).
  double save_freq_min = 1;
  int64_t save_interval_updates = 0;
  int64_t keep_interval_updates = 0;
  /// Validation translates often, and only to compare: greedily, and short, so that a model that
  /// never ends a sentence costs little.
  EvaluationOptions evaluation{.search = {.beam_size = 1, .max_length = 60}};
  double disp_freq_s = 5;  ///< A line about training in the record every this many seconds ...
  int64_t disp_freq_updates = 0;  ///< ... or, if above 0, every this many updates.
  bool quiet = false;
  LogLevel log_level = LogLevel::kInfo;
  ProfilerOptions profile;  ///< A step is an update.
};

/// "ddp", "zero1" ...; with servers "ps-sync", "ps-async".
std::string strategy_name(const TrainingOptions& options);

/// Returns `options` with what follows from others: noam_factor if there is a learn_rate, and
/// whether validation translates.
/// Errors: ConfigError that names the flag, for options that do not go together.
TrainingOptions resolve(TrainingOptions options);

// The tables, by group of the help; together they hold all options but the model's. Their values
// point into `options`.
Options text_options(TrainingOptions& options);  ///< Of data_options, those that `prepare` has.
Options data_options(TrainingOptions& options);
Options optimization_options(TrainingOptions& options);
Options validation_options(TrainingOptions& options);
Options output_options(TrainingOptions& options);
/// Of translation and score, also for commands that evaluate or translate.
Options evaluation_options(EvaluationOptions& options);
Options search_options(nmt::SearchOptions& options);

}  // namespace cohort::translate
