// The main job: N ranks train one translator together.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/profiler.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/strategy.h"
#include "cohort/ps/module/session.h"
#include "cohort/translate/evaluation.h"
#include "cohort/translate/valid_metric.h"

namespace cohort::translate {

/// Options of a run; the flags of `cohort nmt train` fill it, one field each.
struct TrainingOptions {
  std::vector<std::filesystem::path> train_sets;  ///< One or two files, see for_each_pair.
  std::vector<std::filesystem::path> valid_sets;  ///< Likewise.
  std::vector<std::filesystem::path>
      vocabs;                      ///< Two .spm files; made if absent; empty: in model_dir.
  bool joined_dictionary = false;  ///< One vocabulary, trained on both sides' text.
  int64_t sentencepiece_max_lines =
      2'000'000;           ///< A vocabulary is made from so many pairs at most.
  std::string model_dir;   ///< The run's folder.
  std::string cache_dir;   ///< Where token caches are, for several runs; empty: model_dir.
  bool overwrite = false;  ///< An earlier run in model_dir is replaced, not continued.

  nmt::TransformerOptions model;
  nmt::Precision precision = nmt::Precision::kFloat32;
  parallel::Strategy strategy = parallel::Strategy::kDdp;  ///< What of the model each rank holds.
  /// Through parameter servers instead, strategy ps-sync or ps-async: UpdaterOptions::servers.
  std::optional<ps::SessionOptions> servers;
  int64_t tensor_parallel = 1;          ///< Ranks that compute one model together: parallel/mesh.h.
  bool gradient_checkpointing = false;  ///< Memory for time: see layer_runner.h.
  bool cpu_offload = false;             ///< parallel::ShardingOptions::cpu_offload.
  std::string optimizer_state_dir;      ///< optim::AdamOptions::state_folder.

  int64_t mini_batch = 64;  ///< Sentences per rank and batch; 0: only mini_batch_words counts.
  int64_t mini_batch_words =
      0;  ///< Target tokens per rank and batch, padding included; 0: no limit.
  bool mini_batch_fit = false;   ///< Batches as large as `workspace_mib` lets them be.
  int64_t workspace_mib = 2048;  ///< For a batch's tensors on one rank, with mini_batch_fit.
  int64_t maxi_batch = 1000;     ///< Sort by length within windows of so many batches.
  int64_t max_length = 100;      ///< Training pairs with more tokens on a side are dropped, ...
  bool max_length_crop = false;  ///< ... or the side is cut to it.
  int64_t optimizer_delay = 1;   ///< Batches per update and rank.

  double noam_factor = 1;    ///< Factor of the Noam schedule.
  int64_t lr_warmup = 4000;  ///< Updates of linear rise.
  double clip_norm = 1;      ///< Largest global gradient norm; 0: no clipping.
  double exponential_smoothing =
      0;  ///< Weight of the newest parameters in the average that is validated; 0: none.
  uint64_t seed = 1;  ///< Of parameters, data order and dropout.

  int64_t after_epochs = 0;   ///< Stop after so many; 0: no limit.
  int64_t after_batches = 0;  ///< Stop after so many updates; 0: no limit.
  double time_limit_min =
      0;  ///< Stop after so many minutes of training and validation; 0: no limit.
  std::vector<ValidMetric> valid_metrics = {ValidMetric::kBleu, ValidMetric::kChrf,
                                            ValidMetric::kLoss};  ///< The first decides best/.
  int64_t early_stopping = 10;     ///< Stop after so many validations without a new best; 0: never.
  bool valid_on_start = false;     ///< Validate before the first update, too.
  int64_t valid_freq_epochs = 1;   ///< Validate every so many epochs (0: not) ...
  int64_t valid_freq_updates = 0;  ///< ... and every so many updates (0: not).
  double save_freq_min = 1;        ///< Save last/ every so many minutes (0: only at the end).
  int64_t save_interval_updates = 0;  ///< Keep the weights of every so many updates (0: none) ...
  int64_t keep_interval_updates = 0;  ///< ... of which the newest so many stay (0: all).
  EvaluationOptions evaluation;
  double disp_freq_s = 5;         ///< A line about training in the record every so many seconds ...
  int64_t disp_freq_updates = 0;  ///< ... or, if above 0, every so many updates.
  bool quiet = false;             ///< No progress bar.
  LogLevel log_level = LogLevel::kInfo;  ///< Lines below it are left out.
  ProfilerOptions profile;               ///< A trace of some updates; a step is an update.
};

/// "ddp", "zero1" ...; with servers "ps-sync", "ps-async".
std::string strategy_name(const TrainingOptions& options);

struct TrainingResult {
  std::string stop_reason;    ///< Why the run ended, a sentence.
  bool was_asked_to = false;  ///< By SIGTERM or SIGINT, before any goal of its own was reached.
  int64_t epochs = 0;
  int64_t updates = 0;
  std::optional<ValidScores> best;  ///< Of the weights in best/, once there are any.
};

/// Trains and validates; rank 0 writes the run's folder: config.json, source.spm, target.spm
/// (unless `vocabs` names them), history.jsonl, best/ (the checkpoint that the first metric calls
/// best), last/ (where training stands), checkpoints/<update>/ (if asked for) and result-dev.txt.
///
/// A folder with last/ in it is gone on with: on the same number of ranks the result is bit-equal
/// to a run that was never stopped; on another, the epoch goes on with the sentences that it has
/// not seen. With servers such a folder is refused: last/ then has no moments, which are the
/// servers'. SIGTERM and SIGINT, to any rank, end the run after the update at hand with last/
/// written.
///
/// Collective; blocks until the run ends; every rank stops at the same update for the same reason.
/// The gradient of an update is that of the mean loss over all its target tokens on all ranks. With
/// ps-async every rank makes updates of its own and waits for the others only where all validate; a
/// signal or the time limit stops each at the update it is at.
/// Errors: ConfigError for bad input, and for a folder whose run has another model or other
///         training text; PeerError; c10::Error if the loss is no finite number, or the last save
///         fails.
TrainingResult train(const TrainingOptions& options, const comm::ProcessGroup& group);

}  // namespace cohort::translate
