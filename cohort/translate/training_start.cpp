// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <algorithm>
#include <memory>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/translate/batch_fit.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/run_on_ranks.h"
#include "cohort/translate/tensor_parallel_context.h"
#include "cohort/translate/training_run.h"

namespace cohort::translate {
namespace {

train::EarlyStoppingOptions stopping_options(const TrainingOptions& options) {
  return {.patience = options.early_stopping, .better = better_of(options.valid_metrics.front())};
}

}  // namespace

Log TrainingRun::make_log() const {
  return Log({.rank = group_.rank(),
              .world_size = group_.size(),
              .file = options_.model_dir + "/logs/rank" + std::to_string(group_.rank()) + ".log",
              .level = options_.log_level});
}

TrainingRun::TrainingRun(const TrainingOptions& options, Start start, RunData data,
                         const parallel::DeviceMesh& mesh, bool keeps_precision)
    : options_(options),
      group_(mesh.world()),
      data_group_(parallel::data_axes(mesh).group()),
      tensor_group_(mesh.has("tp") ? mesh.group("tp") : comm::ProcessGroup()),
      log_(make_log()),
      data_(std::move(data)),
      early_stopping_(stopping_options(options)),
      profiler_(options.profile, group_.rank(), group_.size()),
      checkpoints_(options, data_.train.sha256, data_.valid_sha256, log_) {
  if (start == Start::kResume) {
    state_ = checkpoints_.read_last(group_);
    early_stopping_ = train::EarlyStopping(stopping_options(options), state_.early_stopping);
  }
  if (!options.optimizer_state_dir.empty() && !group_.device().is_cpu() && !options.cpu_offload)
    throw ConfigError("--optimizer-state-dir keeps moments of parameters on the CPU: expected " +
                      std::string("--device cpu, or --cpu-offload"));
  make_model();
  const bool sharded = parallel::shards_parameters(options.strategy);
  if (options.mini_batch_fit && !sharded) fit_batch_sizes();
  updater_.emplace(model_, group_,
                   UpdaterOptions{.mesh = mesh,
                                  .strategy = options.strategy,
                                  .fill = nmt::Initialiser(options.model, options.seed,
                                                           model_->tensor_parallel()),
                                  .cpu_offload = options.cpu_offload,
                                  .gradient_checkpointing = options.gradient_checkpointing,
                                  .adam = {.beta1 = options.optimizer_params[0],
                                           .beta2 = options.optimizer_params[1],
                                           .eps = options.optimizer_params[2],
                                           .state_folder = options.optimizer_state_dir},
                                  .schedule = {.factor = options.noam_factor,
                                               .width = options.model.dim_emb,
                                               .warmup = options.lr_warmup},
                                  .clip_norm = options.clip_norm,
                                  .exponential_smoothing = options.exponential_smoothing,
                                  .seed = options.seed,
                                  .servers = servers_to_begin_with(start)});
  if (options.mini_batch_fit && sharded) fit_batch_sizes();
  checkpoints_.save_with(updater_->checkpoint_writers());
  prepare_folder(start);
  if (start == Start::kResume) {
    load_last();
    checkpoints_.remove_kept_after(state_.updates);
    log_.info("resumed", {{"epoch", state_.epoch + 1}, {"update", state_.updates}});
    if (keeps_precision) {
      log_.info("--precision auto: the run's precision is used again",
                {{"precision", nmt::to_string(*options_.precision)}});
    }
  }
  open_record();
  report_start();
  rank_speeds_.resize(static_cast<size_t>(data_group_.size()));
  rank_losses_.resize(rank_speeds_.size());
  own_.rank_tokens_per_s = rank_speeds_;
  own_.rank_losses = rank_losses_;
  if (!is_async(options.servers)) return;
  async_sum_.emplace(
      group_, own_.pack().size(), [this] { return own_votes().pack(); },
      [this](const std::vector<double>& own_sums, const std::vector<double>& all_sums) {
        const StepVotes own = StepVotes::unpack(own_sums), all = StepVotes::unpack(all_sums);
        take_votes(all);
        state_.loss_sum += all.loss_sum;
        state_.token_sum += static_cast<int64_t>(all.tokens);
        if (record_)
          record_->trained_elsewhere(all.loss_sum - own.loss_sum,
                                     static_cast<int64_t>(all.tokens - own.tokens), 0);
      });
}

// Where parameters are sharded, no rank ever has the whole model: the updater fills in its local
// shards.
void TrainingRun::make_model() {
  const auto tensor_parallel = tensor_group_ ? make_tensor_parallel_context(tensor_group_)
                                             : std::make_shared<nmt::TensorParallelContext>();
  const bool sharded = parallel::shards_parameters(options_.strategy);
  model_ = nmt::Transformer(options_.model, *options_.precision,
                            sharded ? at::Device(at::kMeta) : group_.device(), tensor_parallel);
  if (!sharded) model_->initialise(options_.seed);
}

// Comes after every check: options that are refused leave an earlier run alone.
void TrainingRun::prepare_folder(Start start) {
  if (start == Start::kResume) return;
  run_on_ranks(group_, "the run's folder", group_.rank() == 0, kFolderLimit, [&] {
    remove_earlier_run(options_.model_dir);
    keep_vocabularies(options_, data_.fresh);
  });
}

// The servers hold the moments: those of last/, or none for a new run, whatever an earlier run or
// start has left in their folders.
std::optional<ps::SessionOptions> TrainingRun::servers_to_begin_with(Start start) const {
  const std::string last = options_.model_dir + "/last";
  if (!options_.servers) {
    if (!state_.servers.empty())
      throw ConfigError(last +
                        ": a run through parameter servers, which have its moments: expected " +
                        "--strategy ps-sync or ps-async");
    return std::nullopt;
  }
  auto servers = options_.servers;
  servers->client.restore = "";
  if (start == Start::kResume) {
    if (state_.servers.empty())
      throw ConfigError(last + ": a run without parameter servers: expected no --strategy " +
                        strategy_name(options_) + ", or another --model-dir");
    servers->client.restore = state_.servers;
  }
  return servers;
}

// --exponential-smoothing may have been added or dropped since last/ was written.
void TrainingRun::load_last() {
  train::ShardedParts parts = updater_->parts();
  if (options_.servers) parts.erase("weights");  // Came from the servers.
  const bool is_there = checkpoints_.last_has("average", group_);
  const bool begins = updater_->average() != nullptr && !is_there;
  if (begins) parts.erase("average");
  if (!parts.empty()) checkpoints_.load_last(parts, updater_->is_sharded(), group_);
  updater_->set_num_updates(state_.updates);
  if (begins) {
    updater_->average()->begin_anew();
    log_.warn("--exponential-smoothing is new to this run: the average starts from last/'s weights",
              {{"update", state_.updates}});
  } else if (is_there && updater_->average() == nullptr) {
    log_.warn(
        "--exponential-smoothing is no longer given: the average is dropped, the weights "
        "themselves are validated",
        {{"update", state_.updates}});
  }
}

void TrainingRun::open_record() {
  const auto machines = group_.gather_object(describe_machine());
  run_on_ranks(group_, "the run's record", group_.rank() == 0, kFolderLimit, [&] {
    record_.emplace(options_,
                    RunStart{.update = state_.updates,
                             .is_validated = state_.is_validated(),
                             .num_parameters = model_->num_parameters(),
                             .train_pairs = data_.train.corpus.size(),
                             .pairs = data_.train.counts,
                             .machines = machines},
                    data_.valid_text, log_);
  });
}

// Before there is an Updater, unless that shards the parameters: then only it can run the model.
// What a trial finds depends on the memory's state, too, so a run that resumes with the same
// options uses what it found before.
void TrainingRun::fit_batch_sizes() {
  const bool sharded = parallel::shards_parameters(options_.strategy);
  const std::string wanted =
      "workspace_mib=" + std::to_string(options_.workspace_mib) +
      " ranks=" + std::to_string(group_.size()) +
      " precision=" + nmt::to_string(*options_.precision) +
      " gradient_checkpointing=" + std::to_string(options_.gradient_checkpointing) +
      (options_.tensor_parallel > 1 ? " tensor_parallel=" + std::to_string(options_.tensor_parallel)
                                    : "") +
      (sharded ? " strategy=" + parallel::to_string(options_.strategy) : "") +
      (group_.device().is_cpu()
           ? ""
           : " device=" + c10::DeviceTypeName(group_.device().type(), /*lower_case=*/true));
  if (state_.fitted_for == wanted) {
    log_.info("batch sizes fitted earlier are used again", {{"for", wanted}});
    return;
  }
  const auto begin = Clock::now();
  int64_t longest = 1;
  for (const auto& [source, target] : data_.train.corpus.lengths())
    longest = std::max<int64_t>({longest, source, target});
  model_->train();
  if (!sharded) set_up_layers(model_, options_.gradient_checkpointing);
  BatchFit fit = fit_batches(model_,
                             {.workspace_bytes = options_.workspace_mib << 20,
                              .longest = longest,
                              .most_rows = data_.train.corpus.size(),
                              .tensor_group = sharded ? group_ : tensor_group_,
                              .sharded = sharded ? &updater_->model() : nullptr},
                             group_);
  for (const BatchFit::Trial& trial : fit.trials) {
    log_.info("batch fits", {{"tokens_per_sentence", trial.width},
                             {"sentences", trial.rows},
                             {"mib", static_cast<double>(trial.peak_bytes) / (1 << 20)},
                             {"workspace_mib", options_.workspace_mib}});
  }
  log_.info("batches were fitted", {{"seconds", seconds_since(begin)}});
  state_.fit_rows = std::move(fit.rows);
  state_.fitted_for = wanted;
}

void TrainingRun::report_start() const {
  log_.info("start", {{"ranks", group_.size()},
                      {"found_by", group_.rank_info().source},
                      {"threads_per_rank", at::get_num_threads()},
                      {"device", group_.device().str()},
                      {"backend", group_.backend()},
                      {"strategy", strategy_name(options_)},
                      {"precision", nmt::to_string(*options_.precision)},
                      {"tensor_parallel", options_.tensor_parallel},
                      {"parameters", model_->num_parameters()}});
  const PairCounts& pairs = data_.train.counts;
  log_.info("data", {{"train_pairs", data_.train.corpus.size()},
                     {"dropped_empty", pairs.dropped_empty},
                     {"dropped_long", pairs.dropped_long},
                     {"cropped", pairs.cropped},
                     {"kept", pairs.kept},
                     {"read", pairs.read},
                     {"valid_pairs", data_.valid.size()},
                     {"valid_dropped_empty", data_.valid_text.num_dropped_empty}});
  if (const auto why =
          text::tokenizer_warning(options_.evaluation.bleu.tokenizer, data_.valid_text.target);
      why && options_.evaluation.translate) {
    log_.warn(*why);
  }
  log_.write(data_.train.was_bad ? LogLevel::kWarn : LogLevel::kInfo, "token cache",
             {{"state", data_.train.origin},
              {"file", data_.train.file.string()},
              {"seconds", data_.seconds}});
}

}  // namespace cohort::translate
