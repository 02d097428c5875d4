#include "cohort/translate/training.h"

#include <ATen/Parallel.h>
#include <chrono>
#include <cmath>
#include <optional>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/free_memory.h"
#include "cohort/base/log.h"
#include "cohort/base/stop_request.h"
#include "cohort/data/prefetch.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/progress.h"
#include "cohort/translate/batch_fit.h"
#include "cohort/translate/run_checkpoints.h"
#include "cohort/translate/run_data.h"
#include "cohort/translate/run_record.h"
#include "cohort/translate/run_state.h"
#include "cohort/translate/updater.h"
#include "cohort/translate/work_alone.h"

namespace cohort::translate {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

train::EarlyStoppingOptions stopping_options(const TrainingOptions& options) {
  return {.patience = options.early_stopping, .better = better_of(options.valid_metrics.front())};
}

// A rank waits for rank 0 to have written some gigabytes.
constexpr std::chrono::minutes kSaveLimit{30};
// Moving and removing files.
constexpr std::chrono::minutes kFolderLimit{10};

// One run on one rank; `run` below is its outline.
class Run {
 public:
  Run(const TrainingOptions& options, Start start, RunData data, comm::ProcessGroup& group);
  TrainingResult loop();

 private:
  struct Update {
    std::vector<nmt::Batch> batches;
    std::vector<int64_t> sentences;  // of all batches, by number in data_.train
  };

  bool train_epoch();  // whether it came to the end
  void run();
  void update(const Update& update, int64_t step, int64_t num_steps);
  void report_skipped(const Update& update, const BadNumber& bad, double loss);
  void validate();
  void report_validation(const ValidScores& scores, double train_loss, double tokens_per_s) const;
  bool is_valid_update() const;
  void check_goals();
  void save();
  void save_if_due();
  RunState state_now() const;
  TrainingResult result() const;
  void make_folder_ours(Start start);
  void open_record();
  double seconds() const { return state_.seconds + seconds_since(start_); }
  void decide_to_stop(const std::string& reason) {
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  Log make_log() const;
  void report_start() const;
  void fit_batch_sizes();
  data::BatchOptions batch_options() const;

  const TrainingOptions& options_;
  comm::ProcessGroup& group_;
  Log log_;
  RunData data_;
  nmt::Transformer model_{nullptr};
  std::optional<Updater> updater_;
  train::EarlyStopping early_stopping_;
  std::optional<RunRecord> record_;  // rank 0
  train::Progress progress_;

  RunCheckpoints checkpoints_;
  StopRequest stop_request_;

  RunState state_;
  Clock::time_point start_;  // of this process's training, after tokenisation and set-up
  Clock::time_point saved_;
  std::string stop_reason_;
  bool was_asked_to_stop_ = false;
};

Log Run::make_log() const {
  return Log({.rank = group_.rank(),
              .world_size = group_.size(),
              .file = options_.model_dir + "/logs/rank" + std::to_string(group_.rank()) + ".log",
              .level = options_.log_level});
}

Run::Run(const TrainingOptions& options, Start start, RunData data, comm::ProcessGroup& group)
    : options_(options),
      group_(group),
      log_(make_log()),
      data_(std::move(data)),
      early_stopping_(stopping_options(options)),
      checkpoints_(options, data_.train.sha256, log_) {
  if (start == Start::kResume) {
    state_ = checkpoints_.read_last(group);
    early_stopping_ = train::EarlyStopping(stopping_options(options), state_.early_stopping);
  }
  model_ = nmt::Transformer(options.model, options.precision);
  model_->initialise(options.seed);
  if (options.mini_batch_fit) fit_batch_sizes();
  updater_.emplace(model_, group,
                   UpdaterOptions{.schedule = {.factor = options.noam_factor,
                                               .width = options.model.dim_emb,
                                               .warmup = options.lr_warmup},
                                  .clip_norm = options.clip_norm,
                                  .exponential_smoothing = options.exponential_smoothing,
                                  .seed = options.seed});
  make_folder_ours(start);
  if (start == Start::kResume) {
    checkpoints_.load_last(updater_->parts(), group);
    updater_->set_num_updates(state_.updates);
    log_.info("resumed", {{"epoch", state_.epoch + 1}, {"update", state_.updates}});
  }
  open_record();
  report_start();
}

// Everything that can be refused has been: an earlier run outlives a refused one.
void Run::make_folder_ours(Start start) {
  if (start == Start::kResume) return;
  work_alone(group_, "the run's folder", group_.rank() == 0, kFolderLimit, [&] {
    remove_earlier_run(options_.model_dir);
    keep_vocabularies(options_, data_.fresh);
  });
}

void Run::open_record() {
  const auto machines = group_.gather_text(describe_machine());
  work_alone(group_, "the run's record", group_.rank() == 0, kFolderLimit, [&] {
    record_.emplace(options_,
                    RunStart{.update = state_.updates,
                             .is_validated = state_.is_validated(),
                             .num_parameters = nmt::count_parameters(*model_),
                             .train_pairs = data_.train.corpus.size(),
                             .pairs = data_.train.counts,
                             .machines = machines},
                    data_.valid_text, log_);
  });
}

// Before there is an Updater: the trials' gradients are nobody's. What a trial finds depends on the
// memory's state, too, so a run that goes on as it was uses what it found.
void Run::fit_batch_sizes() {
  const std::string wanted =
      "workspace_mib=" + std::to_string(options_.workspace_mib) +
      " ranks=" + std::to_string(group_.size()) +
      " precision=" + nmt::to_string(options_.precision) +
      " gradient_checkpointing=" + std::to_string(options_.model.gradient_checkpointing);
  if (state_.fitted_for == wanted) {
    log_.info("batches are those that were fitted before", {{"for", wanted}});
    return;
  }
  const auto begin = Clock::now();
  int64_t longest = 1;
  for (const auto& [source, target] : data_.train.corpus.lengths())
    longest = std::max<int64_t>({longest, source, target});
  model_->train();
  BatchFit fit = fit_batches(model_,
                             {.workspace_bytes = options_.workspace_mib << 20,
                              .longest = longest,
                              .most_rows = data_.train.corpus.size()},
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
                      {"found_by", group_.place().source},
                      {"threads_per_rank", at::get_num_threads()},
                      {"precision", nmt::to_string(options_.precision)},
                      {"parameters", nmt::count_parameters(*model_)}});
  const PairCounts& pairs = data_.train.counts;
  log_.info("data", {{"train_pairs", data_.train.corpus.size()},
                     {"dropped_empty", pairs.dropped_empty},
                     {"dropped_long", pairs.dropped_long},
                     {"cropped", pairs.cropped},
                     {"kept", pairs.kept},
                     {"read", pairs.read},
                     {"valid_pairs", data_.valid.size()},
                     {"valid_dropped_empty", data_.valid_text.num_dropped_empty}});
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
  if (group_.rank() == 0) checkpoints_.save_last(state_now(), updater_->parts());
  saved_ = Clock::now();
}

void Run::save_if_due() {
  if (options_.save_freq_min > 0 && seconds_since(saved_) > 60 * options_.save_freq_min &&
      !checkpoints_.busy()) {
    save();
  }
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
  start_ = saved_ = Clock::now();
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
    const bool last =
        !stop_reason_.empty() || (options_.after_epochs > 0 && done >= options_.after_epochs);
    const bool due = options_.valid_freq_epochs > 0 && done % options_.valid_freq_epochs == 0;
    if ((due || last) && !was_asked_to_stop_ && state_.token_sum > 0) validate();
    if (done > state_.epoch) state_.trained.clear();
    state_.epoch = done;
    save_if_due();
  }
  save();
  work_alone(group_, "last checkpoint", group_.rank() == 0, kSaveLimit,
             [&] { checkpoints_.finish(); });
  const std::string best = "best_" + to_string(options_.valid_metrics.front());
  log_.info("end", {{"reason", stop_reason_},
                    {"epochs", state_.epoch},
                    {"updates", state_.updates},
                    {best, early_stopping_.state().best.value_or(std::nan(""))},
                    {"minutes", seconds() / 60}});
}

data::BatchOptions Run::batch_options() const {
  return {.mini_batch = options_.mini_batch,
          .mini_batch_words = options_.mini_batch_words,
          .fit_rows = options_.mini_batch_fit ? state_.fit_rows : std::vector<int64_t>{},
          .maxi_batch = options_.maxi_batch,
          .optimizer_delay = options_.optimizer_delay,
          .seed = options_.seed,
          .rank = group_.rank(),
          .world_size = group_.size()};
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
    if (is_valid_update() && !was_asked_to_stop_) {
      validate();
      check_goals();
    }
    if (group_.rank() == 0 && options_.save_interval_updates > 0 && !state_.skipped_in_a_row &&
        state_.updates % options_.save_interval_updates == 0) {
      checkpoints_.save_kept(state_now(), updater_->parts());
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

// All ranks know whose number it was, so all say the same, rank 0 on the terminal. After too many
// in a row the run ends, and last/ is what it was before the first of them or between two.
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
  if (bad.rank >= 0) sentences = group_.broadcast_text(sentences, bad.rank);
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

void Run::update(const Update& update, int64_t step, int64_t num_steps) {
  const auto start = Clock::now();
  const int world = group_.size();
  const UpdateReport own = updater_->update(update.batches);
  state_.updates = updater_->num_updates();

  // One exchange of small numbers: the loss, who wants to stop, each rank's speed.
  enum Fact { kLoss, kTimeIsUp, kAsked, kSpeeds };
  at::Tensor facts = at::zeros({kSpeeds + world}, at::kDouble);
  double* fact = facts.data_ptr<double>();
  fact[kLoss] = own.nll_sum;
  const bool time_is_up = options_.time_limit_min > 0 && seconds() > 60 * options_.time_limit_min;
  fact[kTimeIsUp] = group_.rank() == 0 && time_is_up ? 1 : 0;
  fact[kAsked] = stop_request_.signal() != 0 ? 1 : 0;
  fact[kSpeeds + group_.rank()] = static_cast<double>(own.own_tokens) / own.compute_seconds;
  group_.all_reduce(facts);
  const auto tokens = static_cast<double>(own.num_tokens);
  const double loss = fact[kLoss] / tokens;
  const double update_seconds = seconds_since(start);
  state_.train_seconds += update_seconds;
  if (own.skipped) {
    report_skipped(update, own.bad, loss);
  } else {
    state_.skipped_in_a_row = 0;
    state_.loss_sum += fact[kLoss];
    state_.token_sum += own.num_tokens;
  }
  if (fact[kTimeIsUp] > 0) decide_to_stop("reached the time limit");
  check_goals();
  if (fact[kAsked] > 0 && stop_reason_.empty()) {
    decide_to_stop("asked to stop by a signal; the same command goes on");
    was_asked_to_stop_ = true;
  }
  if (group_.rank() != 0) return;
  const std::vector<double> rank_speeds(fact + kSpeeds, fact + kSpeeds + world);
  record_->trained({.epoch = state_.epoch + 1,
                    .update = state_.updates,
                    .run_seconds = seconds(),
                    .skipped = own.skipped,
                    .loss_sum = fact[kLoss],
                    .tokens = own.num_tokens,
                    .gradient_norm = own.gradient_norm,
                    .learning_rate = updater_->learning_rate(),
                    .own_seconds = update_seconds,
                    .rank_tokens_per_s = rank_speeds});
  if (options_.quiet) return;
  progress_.update({.epoch = state_.epoch + 1,
                    .step = step,
                    .num_steps = num_steps,
                    .loss = loss,
                    .learning_rate = updater_->learning_rate(),
                    .rank_tokens_per_s = rank_speeds,
                    .tokens_per_s = tokens / update_seconds});
}

void Run::report_validation(const ValidScores& scores, double train_loss,
                            double tokens_per_s) const {
  const std::string best_name = "best_" + to_string(options_.valid_metrics.front());
  const LogField epoch("epoch", state_.epoch + 1), update("update", state_.updates),
      train("train_loss", train_loss), loss("valid_loss", scores.loss),
      best(best_name, early_stopping_.state().best.value_or(std::nan(""))),
      speed("tgt_tokens_per_s", tokens_per_s);
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
  // Not a number before the first update: 0 / 0.
  const double train_loss = state_.loss_sum / static_cast<double>(state_.token_sum);
  const double tokens_per_s = static_cast<double>(state_.token_sum) / state_.train_seconds;
  state_.loss_sum = 0;
  state_.token_sum = 0;
  state_.train_seconds = 0;
  const optim::AveragesInPlace smoothed(
      updater_->average());  // scored and saved as they are used later
  const Evaluation evaluation = evaluate(model_, data_.valid, data_.valid_text.target,
                                         data_.tokenizers.target, group_, options_.evaluation);
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
  if (group_.rank() == 0) {
    if (improved) checkpoints_.save_best(state_now(), train::state_of(*model_));
    record_->validated({.epoch = state_.epoch + 1,
                        .update = state_.updates,
                        .seconds = seconds(),
                        .train_loss = train_loss,
                        .scores = scores,
                        .best = improved,
                        .learning_rate = updater_->learning_rate(),
                        .tgt_tokens_per_s = tokens_per_s,
                        .own_seconds = seconds_since(start)},
                       evaluation.translations);
  }
  give_back_free_memory();  // translations of all lengths have left holes in it
  group_.barrier("validation");
}

}  // namespace

TrainingResult train(const TrainingOptions& options, comm::ProcessGroup& group) {
  auto valid_text = text::read_parallel_text(options.valid_sets);  // before anything is written
  std::string decision;
  work_alone(group, "the run's folder", group.rank() == 0, kFolderLimit,
             [&] { decision = find_start(options) == Start::kResume ? "resume" : "fresh"; });
  const Start start = group.broadcast_text(decision) == "resume" ? Start::kResume : Start::kFresh;
  RunData data = prepare_data(options, std::move(valid_text), start, group);
  return Run(options, start, std::move(data), group).loop();
}

}  // namespace cohort::translate
