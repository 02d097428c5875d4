#include "cohort/translate/training.h"

#include <ATen/Parallel.h>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <torch/types.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/free_memory.h"
#include "cohort/base/log.h"
#include "cohort/base/stop_request.h"
#include "cohort/data/prefetch.h"
#include "cohort/parallel/strategy.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/progress.h"
#include "cohort/translate/async_sum.h"
#include "cohort/translate/batch_fit.h"
#include "cohort/translate/gpu_watch.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/run_checkpoints.h"
#include "cohort/translate/run_data.h"
#include "cohort/translate/run_on_ranks.h"
#include "cohort/translate/run_record.h"
#include "cohort/translate/run_state.h"
#include "cohort/translate/tensor_parallel_context.h"
#include "cohort/translate/updater.h"

namespace cohort::translate {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Of the time since the last validation there may be nothing to tell.
std::optional<double> number_if_any(double number) {
  return std::isnan(number) ? std::nullopt : std::optional(number);
}

train::EarlyStoppingOptions stopping_options(const TrainingOptions& options) {
  return {.patience = options.early_stopping, .better = better_of(options.valid_metrics.front())};
}

// A rank waits for rank 0 to have written some gigabytes.
constexpr std::chrono::minutes kSaveLimit{30};
// Moving and removing files.
constexpr std::chrono::minutes kFolderLimit{10};

// What ranks tell each other while they train, as sums over them. With ps-async each tells what has
// become known since it told the last time, the others what is of the last update.
enum Statistic : size_t { kLoss, kTokenSum, kTimeIsUp, kAsked, kSaveIsDue, kWriting, kSpeeds };

// One run on one rank; `run` below is its outline.
class Run {
 public:
  Run(const TrainingOptions& options, Start start, RunData data, const parallel::DeviceMesh& mesh);
  TrainingResult loop();

 private:
  struct Update {
    std::vector<nmt::Batch> batches;
    std::vector<int64_t> sentences;  // of all batches, by number in data_.train
  };

  bool train_epoch();  // whether it came to the end
  void run();
  void update(const Update& update, int64_t step, int64_t num_steps);
  std::vector<double> own_statistics();
  void take_statistics(const std::vector<double>& sums);
  void exchange_statistics(const Update& update, const UpdateReport& own);
  void tell_in_background(const Update& update, const UpdateReport& own);
  bool is_sync_point() const;
  void synchronize(bool is_planned);
  void conclude(bool at_one_update);
  void report_trained(const UpdateReport& own, int64_t step, int64_t num_steps, double seconds);
  void report_skipped(const Update& update, const BadNumber& bad, double loss);
  void validate();
  void report_validation(const ValidScores& scores, double train_loss, double tokens_per_s) const;
  void release_free_memory_sometimes();
  bool is_valid_update() const;
  bool is_save_due() const;
  bool is_time_up() const;
  void check_goals();
  void save();
  bool save_servers();
  void save_if_due();
  RunState state_now() const;
  TrainingResult result() const;
  void make_folder_ours(Start start);
  std::optional<ps::SessionOptions> servers_to_begin_with(Start start) const;
  void load_last();
  void open_record();
  double seconds() const { return state_.seconds + seconds_since(start_); }
  void decide_to_stop(const std::string& reason) {
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  Log make_log() const;
  void report_start() const;
  void make_model();
  void fit_batch_sizes();
  data::BatchOptions batch_options() const;

  const TrainingOptions& options_;
  comm::ProcessGroup group_;
  comm::ProcessGroup data_group_;    // each rank has batches of its own
  comm::ProcessGroup tensor_group_;  // of the ranks that compute one model; empty: it is whole
  Log log_;
  RunData data_;
  nmt::Transformer model_{nullptr};
  std::optional<Updater> updater_;
  train::EarlyStopping early_stopping_;
  std::optional<RunRecord> record_;  // rank 0
  GpuWatch gpu_watch_{group_.rank_info().local_rank == 0 ? GpuWatch::Role::kSamples
                                                         : GpuWatch::Role::kRests};
  train::Progress progress_;
  Profiler profiler_;

  RunCheckpoints checkpoints_;
  StopRequest stop_request_;

  RunState state_;
  Clock::time_point start_;  // of this process's training, after tokenisation and set-up
  Clock::time_point saved_;
  bool save_is_due_ = false;  // the same on all writers
  Clock::time_point gave_back_;

  // What this rank has to tell, and what it was told last.
  double untold_loss_ = 0;
  int64_t untold_tokens_ = 0;
  double own_speed_ = 0;
  double loss_sum_ = 0;  // of the last update
  std::vector<double> rank_speeds_;
  bool time_is_up_ = false;
  bool was_asked_ = false;
  std::optional<AsyncSum> async_sum_;  // ps-async: how statistics travel

  std::string stop_reason_;
  bool was_asked_to_stop_ = false;
};

Log Run::make_log() const {
  return Log({.rank = group_.rank(),
              .world_size = group_.size(),
              .file = options_.model_dir + "/logs/rank" + std::to_string(group_.rank()) + ".log",
              .level = options_.log_level});
}

Run::Run(const TrainingOptions& options, Start start, RunData data,
         const parallel::DeviceMesh& mesh)
    : options_(options),
      group_(mesh.world()),
      data_group_(parallel::data_axes(mesh).group()),
      tensor_group_(mesh.has("tp") ? mesh.group("tp") : comm::ProcessGroup()),
      log_(make_log()),
      data_(std::move(data)),
      early_stopping_(stopping_options(options)),
      profiler_(options.profile, group_.rank(), group_.size()),
      checkpoints_(options, data_.train.sha256, log_) {
  if (start == Start::kResume) {
    state_ = checkpoints_.read_last(group_);
    early_stopping_ = train::EarlyStopping(stopping_options(options), state_.early_stopping);
  }
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
  make_folder_ours(start);
  if (start == Start::kResume) {
    load_last();
    log_.info("resumed", {{"epoch", state_.epoch + 1}, {"update", state_.updates}});
  }
  open_record();
  report_start();
  rank_speeds_.resize(static_cast<size_t>(data_group_.size()));
  if (is_async(options.servers)) {
    async_sum_.emplace(
        group_, kSpeeds + rank_speeds_.size(), [this] { return own_statistics(); },
        [this](const std::vector<double>& own, const std::vector<double>& sums) {
          take_statistics(sums);
          state_.loss_sum += sums[kLoss];
          state_.token_sum += static_cast<int64_t>(sums[kTokenSum]);
          if (record_)
            record_->trained_elsewhere(sums[kLoss] - own[kLoss],
                                       static_cast<int64_t>(sums[kTokenSum] - own[kTokenSum]), 0);
        });
  }
}

// Where parameters are sharded, no rank ever has the whole model: the updater fills in its local
// shards.
void Run::make_model() {
  const auto tensor_parallel = tensor_group_ ? make_tensor_parallel_context(tensor_group_)
                                             : std::make_shared<nmt::TensorParallelContext>();
  const bool sharded = parallel::shards_parameters(options_.strategy);
  model_ = nmt::Transformer(options_.model, options_.precision, sharded ? at::kMeta : at::kCPU,
                            tensor_parallel);
  if (!sharded) model_->initialise(options_.seed);
}

// Everything that can be refused has been: an earlier run outlives a refused one.
void Run::make_folder_ours(Start start) {
  if (start == Start::kResume) return;
  run_on_ranks(group_, "the run's folder", group_.rank() == 0, kFolderLimit, [&] {
    remove_earlier_run(options_.model_dir);
    keep_vocabularies(options_, data_.fresh);
  });
}

// They hold the moments: those of last/, or at the beginning none, whatever an earlier run or start
// has left in their folders.
std::optional<ps::SessionOptions> Run::servers_to_begin_with(Start start) const {
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

// The average may be asked for, or no longer, as the run goes on.
void Run::load_last() {
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

void Run::open_record() {
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
// What a trial finds depends on the memory's state, too, so a run that goes on as it was uses what
// it found.
void Run::fit_batch_sizes() {
  const bool sharded = parallel::shards_parameters(options_.strategy);
  const std::string wanted =
      "workspace_mib=" + std::to_string(options_.workspace_mib) +
      " ranks=" + std::to_string(group_.size()) +
      " precision=" + nmt::to_string(options_.precision) +
      " gradient_checkpointing=" + std::to_string(options_.gradient_checkpointing) +
      (options_.tensor_parallel > 1 ? " tensor_parallel=" + std::to_string(options_.tensor_parallel)
                                    : "") +
      (sharded ? " strategy=" + parallel::to_string(options_.strategy) : "");
  if (state_.fitted_for == wanted) {
    log_.info("batches are those that were fitted before", {{"for", wanted}});
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

void Run::report_start() const {
  log_.info("start", {{"ranks", group_.size()},
                      {"found_by", group_.rank_info().source},
                      {"threads_per_rank", at::get_num_threads()},
                      {"strategy", strategy_name(options_)},
                      {"precision", nmt::to_string(options_.precision)},
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

RunState Run::state_now() const {
  RunState now = state_;
  now.seconds = seconds();
  now.early_stopping = early_stopping_.state();
  return now;
}

void Run::save() {
  if (options_.servers && !save_servers()) return;
  checkpoints_.save_last(state_now(), updater_->parts(Replicated::kOnce));
  saved_ = Clock::now();
  save_is_due_ = false;
}

// Where last/ is to say they are. A save that fails leaves that and theirs as they were.
bool Run::save_servers() {
  const auto folder = std::filesystem::absolute(options_.model_dir) / "servers";
  const std::string path = folder / ("update-" + std::to_string(state_.updates));
  try {
    updater_->save_servers(path);
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    log_.error("a checkpoint was not written", {{"why", one_line(error)}});
    saved_ = Clock::now();
    save_is_due_ = false;
    return false;
  }
  state_.servers = path;
  return true;
}

void Run::save_if_due() {
  // With servers all ranks take part, of which one knows what it still writes.
  if (save_is_due_ && (options_.servers || !checkpoints_.pending())) save();
}

// Whether --valid-freq wants a validation after the update that was made last, and it has not been.
bool Run::is_valid_update() const {
  return options_.valid_freq_updates > 0 && state_.updates % options_.valid_freq_updates == 0 &&
         state_.token_sum > 0;
}

// Every rank comes to the same conclusion, for they hold the same state.
void Run::check_goals() {
  if (options_.after_epochs > 0 && state_.epoch >= options_.after_epochs)
    decide_to_stop("reached --after-epochs " + std::to_string(options_.after_epochs));
  if (options_.after_batches > 0 && state_.updates >= options_.after_batches)
    decide_to_stop("reached --after-batches " + std::to_string(options_.after_batches));
  if (early_stopping_.should_stop()) {
    decide_to_stop("no better " + to_string(options_.valid_metrics.front()) + " in " +
                   std::to_string(options_.early_stopping) + " validations");
  }
}

TrainingResult Run::loop() {
  start_ = saved_ = gave_back_ = Clock::now();
  try {
    run();
  } catch (const std::exception& error) {
    stop_reason_ = one_line(error);
    if (record_) record_->ended(result(), seconds());
    throw;
  }
  if (record_) record_->ended(result(), seconds());
  return result();
}

TrainingResult Run::result() const {
  return {.stop_reason = stop_reason_,
          .was_asked_to = was_asked_to_stop_,
          .epochs = state_.epoch,
          .updates = state_.updates,
          .best = state_.best};
}

void Run::run() {
  model_->train();
  if (state_.updates == 0) {
    save();  // a run that is killed in its first validation goes on, too
    if (options_.valid_on_start && !state_now().is_validated()) {
      validate();
      save();
    }
  } else if (is_valid_update()) {
    validate();  // the run was asked to stop before it could
  }
  for (check_goals(); stop_reason_.empty(); check_goals()) {
    const int64_t done = state_.epoch + (train_epoch() ? 1 : 0);  // not one that was cut short
    const bool due = !stop_reason_.empty() ||
                     (options_.after_epochs > 0 && done >= options_.after_epochs) ||
                     (options_.valid_freq_epochs > 0 && done % options_.valid_freq_epochs == 0);
    if (async_sum_ && due && stop_reason_.empty()) synchronize(/*is_planned=*/true);
    if (due && !was_asked_to_stop_ && state_.token_sum > 0) validate();
    if (done > state_.epoch) state_.trained.clear();
    state_.epoch = done;
    save_if_due();
  }
  save();
  for (const auto& step : {&RunCheckpoints::wait_written, &RunCheckpoints::finish})
    run_on_ranks(group_, "last checkpoint", checkpoints_.saves(), kSaveLimit,
                 [&] { (checkpoints_.*step)(); });
  updater_->finish();
  const std::string best = "best_" + to_string(options_.valid_metrics.front());
  log_.info("end", {{"reason", stop_reason_},
                    {"epochs", state_.epoch},
                    {"updates", state_.updates},
                    {best, early_stopping_.state().best},
                    {"minutes", seconds() / 60}});
  profiler_.finish();
}

data::BatchOptions Run::batch_options() const {
  return {.mini_batch = options_.mini_batch,
          .mini_batch_words = options_.mini_batch_words,
          .fit_rows = options_.mini_batch_fit ? state_.fit_rows : std::vector<int64_t>{},
          .maxi_batch = options_.maxi_batch,
          .optimizer_delay = options_.optimizer_delay,
          .seed = options_.seed,
          .rank = data_group_.rank(),
          .world_size = data_group_.size()};
}

bool Run::train_epoch() {
  const data::BatchOptions options = batch_options();
  const auto plan =
      data::plan_rest(data_.train.corpus.lengths(), options, state_.epoch, state_.trained);
  if (state_.trained.empty() || !data::same_plan(state_.trained.back().options, options)) {
    if (!state_.trained.empty())
      log_.info("the rest of the epoch is planned anew: ranks, batch sizes or seed are others",
                {{"epoch", state_.epoch + 1}, {"sentences", plan.num_sentences}});
    state_.trained.push_back({.options = options});
  }
  auto& num_trained = state_.trained.back().num_batches;
  const int64_t delay = options_.optimizer_delay;
  int64_t step = num_trained / delay;
  const int64_t num_steps = step + std::ssize(plan.batches) / delay;
  if (state_.updates == 0) {
    log_.info("batches", {{"updates_per_epoch", num_steps},
                          {"padding_share", plan.padding_share},
                          {"dropped", plan.num_dropped}});
  }
  size_t next = 0;
  data::Prefetcher<Update> loader([&]() -> std::optional<Update> {
    if (next >= plan.batches.size()) return std::nullopt;
    Update update;
    for (int64_t i = 0; i < delay; ++i, ++next) {
      const auto& sentences = plan.batches[next];
      update.batches.push_back(make_batch(data_.train.corpus, sentences));
      update.sentences.insert(update.sentences.end(), sentences.begin(), sentences.end());
    }
    return update;
  });
  while (const auto next_update = loader.next()) {
    num_trained += std::ssize(next_update->batches);
    update(*next_update, ++step, num_steps);
    if (async_sum_ && (is_sync_point() || time_is_up_ || was_asked_)) synchronize(is_sync_point());
    if (is_valid_update() && stop_reason_.empty()) {
      validate();
      check_goals();
    }
    if (options_.save_interval_updates > 0 && !state_.skipped_in_a_row &&
        state_.updates % options_.save_interval_updates == 0) {
      checkpoints_.save_kept(state_now(), updater_->parts(Replicated::kOnce));
    }
    if (!stop_reason_.empty()) {
      progress_.finish();  // before anything else is said
      // One that was asked to stop ends the epoch when it goes on: with its validation.
      return step == num_steps && !was_asked_to_stop_;
    }
    if (step < num_steps) save_if_due();  // the epoch's end validates first
  }
  progress_.finish();
  return true;
}

// All ranks know whose number it was, so all say the same, rank 0 on the terminal; with ps-async
// the rank whose it was says it alone. After too many in a row the run ends, and last/ is what it
// was before the first of them or between two.
void Run::report_skipped(const Update& update, const BadNumber& bad, double loss) {
  constexpr int64_t kMostInARow = 10;
  std::string sentences;
  if (bad.rank == group_.rank()) {
    const auto of_batch = [&](int64_t i) {
      return update.batches[static_cast<size_t>(i)].source_lengths_B.size(0);
    };
    int64_t first = 0;
    for (int64_t i = 0; i < bad.batch; ++i) first += of_batch(i);
    for (int64_t i = first; i < first + of_batch(bad.batch) && sentences.size() <= 200; ++i) {
      sentences += (sentences.empty() ? "" : " | ") +
                   data_.tokenizers.source.decode(
                       data_.train.corpus.source(update.sentences[static_cast<size_t>(i)]));
    }
  }
  if (bad.rank >= 0 && !async_sum_) sentences = group_.broadcast_object(sentences, bad.rank);
  progress_.clear();
  const std::string rank = bad.rank < 0 ? "none: the sum over ranks" : std::to_string(bad.rank);
  log_.warn("skipped an update: a number is not finite", {{"after_update", state_.updates},
                                                          {"rank", rank},
                                                          {"loss", loss},
                                                          {"gradient", bad.parameter},
                                                          {"sentences", sentences}});
  TORCH_CHECK(++state_.skipped_in_a_row < kMostInARow, "diverged: the loss or the gradient of ",
              bad.parameter, " was no finite number ", kMostInARow, " times in a row after update ",
              state_.updates, "; last/ holds finite parameters (a lower --learn-rate may help)");
}

bool Run::is_save_due() const {
  return options_.save_freq_min > 0 && seconds_since(saved_) > 60 * options_.save_freq_min;
}

// By rank 0's clock.
bool Run::is_time_up() const {
  return group_.rank() == 0 && options_.time_limit_min > 0 &&
         seconds() > 60 * options_.time_limit_min;
}

std::vector<double> Run::own_statistics() {
  std::vector<double> statistics(kSpeeds + static_cast<size_t>(data_group_.size()));
  statistics[kLoss] = std::exchange(untold_loss_, 0);
  statistics[kTokenSum] = static_cast<double>(std::exchange(untold_tokens_, 0));
  statistics[kTimeIsUp] = is_time_up() ? 1 : 0;
  statistics[kAsked] = stop_request_.signal() != 0 ? 1 : 0;
  statistics[kSaveIsDue] = group_.rank() == 0 && is_save_due() ? 1 : 0;
  statistics[kWriting] = checkpoints_.writing() ? 1 : 0;
  statistics[kSpeeds + static_cast<size_t>(data_group_.rank())] = own_speed_;
  return statistics;
}

void Run::take_statistics(const std::vector<double>& sums) {
  time_is_up_ = time_is_up_ || sums[kTimeIsUp] > 0;
  was_asked_ = was_asked_ || sums[kAsked] > 0;
  rank_speeds_.assign(sums.begin() + kSpeeds, sums.end());
}

// One exchange of small numbers: the loss, who wants to stop, saves, each rank's speed.
void Run::exchange_statistics(const Update& update, const UpdateReport& own) {
  at::Tensor statistics = at::tensor(own_statistics(), at::kDouble);
  group_.all_reduce(statistics);
  const double* sums = statistics.const_data_ptr<double>();
  take_statistics({sums, sums + statistics.numel()});
  loss_sum_ = sums[kLoss];
  if (own.skipped) {
    report_skipped(update, own.bad, loss_sum_ / static_cast<double>(own.num_tokens));
  } else {
    state_.skipped_in_a_row = 0;
    state_.loss_sum += sums[kLoss];
    state_.token_sum += own.num_tokens;
  }
  save_is_due_ = sums[kSaveIsDue] > 0;
  if (sums[kWriting] == 0) checkpoints_.finish_save();
  conclude(/*at_one_update=*/true);
}

// With ps-async. Rank 0 alone saves. What ends the run here is known here at once, and to the
// others when they have taken part in a round.
void Run::tell_in_background(const Update& update, const UpdateReport& own) {
  loss_sum_ = own.nll_sum;
  if (own.skipped) {
    report_skipped(update, own.bad, own.nll_sum / static_cast<double>(own.own_tokens));
  } else {
    state_.skipped_in_a_row = 0;
  }
  save_is_due_ = is_save_due();
  if (!checkpoints_.writing()) checkpoints_.finish_save();
  async_sum_->poll();
  time_is_up_ = time_is_up_ || is_time_up();
  was_asked_ = was_asked_ || stop_request_.signal() != 0;
}

// With ps-async, where all ranks synchronize: after the same number of updates.
bool Run::is_sync_point() const {
  return (options_.valid_freq_updates > 0 && state_.updates % options_.valid_freq_updates == 0) ||
         (options_.after_batches > 0 && state_.updates >= options_.after_batches);
}

// With ps-async. A rank also comes when it has heard that the run is to stop; then ranks are
// anywhere, and what they conclude must not depend on where.
void Run::synchronize(bool is_planned) {
  const auto start = Clock::now();
  async_sum_->synchronize();
  const bool at_one_update = group_.all_reduce_sum(is_planned ? 1 : 0) == group_.size();
  const double waited = seconds_since(start);
  state_.train_seconds += waited;
  if (record_) record_->trained_elsewhere(0, 0, waited);
  conclude(at_one_update);
}

// Every rank comes to the same conclusion, for they have been told the same.
void Run::conclude(bool at_one_update) {
  if (time_is_up_) decide_to_stop("reached the time limit");
  if (at_one_update) check_goals();
  if (was_asked_ && stop_reason_.empty()) {
    decide_to_stop("asked to stop by a signal; the same command goes on");
    was_asked_to_stop_ = true;
  }
}

void Run::update(const Update& update, int64_t step, int64_t num_steps) {
  profiler_.step();
  const auto start = Clock::now();
  // Of the ranks that compute a model together, one speaks.
  const bool speaks = !tensor_group_ || tensor_group_.rank() == 0;
  const UpdateReport own = updater_->update(update.batches);
  state_.updates = updater_->num_updates();
  gpu_watch_.sample_if_due();
  const bool counts = speaks && !(async_sum_ && own.skipped);
  untold_loss_ += counts ? own.nll_sum : 0;
  untold_tokens_ += counts ? own.own_tokens : 0;
  own_speed_ = speaks ? static_cast<double>(own.own_tokens) / own.compute_seconds : 0;
  if (async_sum_) {
    tell_in_background(update, own);
  } else {
    exchange_statistics(update, own);
  }
  const double update_seconds = seconds_since(start);
  state_.train_seconds += update_seconds;
  release_free_memory_sometimes();
  if (group_.rank() == 0) report_trained(own, step, num_steps, update_seconds);
}

void Run::report_trained(const UpdateReport& own, int64_t step, int64_t num_steps, double seconds) {
  const auto tokens = static_cast<double>(own.num_tokens);
  record_->trained({.epoch = state_.epoch + 1,
                    .update = state_.updates,
                    .run_seconds = this->seconds(),
                    .skipped = own.skipped,
                    .loss_sum = loss_sum_,
                    .tokens = own.num_tokens,
                    .gradient_norm = own.gradient_norm,
                    .learning_rate = updater_->learning_rate(),
                    .own_seconds = seconds,
                    .rank_tokens_per_s = rank_speeds_});
  if (options_.quiet) return;
  progress_.update({.epoch = state_.epoch + 1,
                    .step = step,
                    .num_steps = num_steps,
                    .loss = loss_sum_ / tokens,
                    .learning_rate = updater_->learning_rate(),
                    .rank_tokens_per_s = rank_speeds_,
                    .tokens_per_s = async_sum_ ? std::nullopt : std::optional(tokens / seconds)});
}

// Batches of all lengths leave holes of all lengths.
void Run::release_free_memory_sometimes() {
  if (seconds_since(gave_back_) < 30) return;
  release_free_memory();
  gave_back_ = Clock::now();
}

void Run::report_validation(const ValidScores& scores, double train_loss,
                            double tokens_per_s) const {
  const std::string best_name = "best_" + to_string(options_.valid_metrics.front());
  const LogField epoch("epoch", state_.epoch + 1), update("update", state_.updates),
      train("train_loss", number_if_any(train_loss)), loss("valid_loss", scores.loss),
      best(best_name, early_stopping_.state().best),
      speed("tgt_tokens_per_s", number_if_any(tokens_per_s));
  if (scores.bleu && scores.chrf) {
    log_.info("valid", {epoch,
                        update,
                        train,
                        loss,
                        {"valid_bleu", *scores.bleu},
                        {"valid_chrf", *scores.chrf},
                        best,
                        speed});
  } else {
    log_.info("valid", {epoch, update, train, loss, best, speed});
  }
}

void Run::validate() {
  const auto start = Clock::now();
  progress_.clear();
  updater_->wait_for_updates();
  const auto gpu_use = group_.gather_object(gpu_watch_.take());
  // Not a number before the first update: 0 / 0.
  const double train_loss = state_.loss_sum / static_cast<double>(state_.token_sum);
  const double tokens_per_s = static_cast<double>(state_.token_sum) / state_.train_seconds;
  state_.loss_sum = 0;
  state_.token_sum = 0;
  state_.train_seconds = 0;
  const optim::AveragesInPlace smoothed(
      updater_->average());  // scored and saved as they are used later
  const auto whole = updater_->model().unsharded();
  const Evaluation evaluation = evaluate(model_, data_.valid, data_.valid_text.target,
                                         data_.tokenizers.target, data_group_, options_.evaluation);
  ValidScores scores{.loss = evaluation.loss};
  if (options_.evaluation.translate) {
    scores.bleu = evaluation.bleu.score;
    scores.chrf = evaluation.chrf.score;
  }
  // Rank 0's number decides: another CPU's logarithm might differ in the last bit.
  at::Tensor decisive = at::tensor({value_of(scores, options_.valid_metrics.front())}, at::kDouble);
  group_.broadcast(decisive);
  const bool improved = early_stopping_.update(decisive.item<double>());
  if (improved) {
    state_.best = scores;
    state_.best_update = state_.updates;
  }
  report_validation(scores, train_loss, tokens_per_s);
  if (improved)
    checkpoints_.save_best(state_now(), updater_->parts(Replicated::kOnce).at("weights"));
  if (group_.rank() == 0) {
    record_->validated({.epoch = state_.epoch + 1,
                        .update = state_.updates,
                        .seconds = seconds(),
                        .train_loss = train_loss,
                        .scores = scores,
                        .best = improved,
                        .learning_rate = updater_->learning_rate(),
                        .tgt_tokens_per_s = tokens_per_s,
                        .own_seconds = seconds_since(start),
                        .gpu_use = gpu_use},
                       evaluation.translations);
  }
  release_free_memory();  // translations of all lengths have left holes in it
  group_.barrier("validation");
}

}  // namespace

TrainingResult train(const TrainingOptions& given, const comm::ProcessGroup& group) {
  const TrainingOptions options = resolve(given);
  const parallel::DeviceMesh mesh = parallel::init_strategy_mesh(
      group, options.strategy, static_cast<int>(options.tensor_parallel));
  auto valid_text = text::read_parallel_text(options.valid_sets);  // before anything is written
  Fd held_folder;
  std::string decision;
  run_on_ranks(group, "the run's folder", group.rank() == 0, kFolderLimit, [&] {
    held_folder = hold_run_folder(options.model_dir);
    decision = find_start(options) == Start::kResume ? "resume" : "fresh";
  });
  const Start start = group.broadcast_object(decision) == "resume" ? Start::kResume : Start::kFresh;
  RunData data = prepare_data(options, std::move(valid_text), start, group);
  return Run(options, start, std::move(data), mesh).loop();
}

}  // namespace cohort::translate
