// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/training.h"

#include <cmath>
#include <filesystem>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/free_memory.h"
#include "cohort/data/prefetch.h"
#include "cohort/train/check_same.h"
#include "cohort/train/hold_folder.h"
#include "cohort/translate/precision.h"
#include "cohort/translate/run_on_ranks.h"
#include "cohort/translate/training_run.h"

namespace cohort::translate {
namespace {

// Of the time since the last validation there may be nothing to tell.
std::optional<double> number_if_any(double number) {
  return std::isnan(number) ? std::nullopt : std::optional(number);
}

// A rank waits for rank 0 to have written some gigabytes.
constexpr std::chrono::minutes kSaveLimit{30};

}  // namespace

RunState TrainingRun::state_now() const {
  RunState now = state_;
  now.seconds = seconds();
  now.early_stopping = early_stopping_.state();
  return now;
}

void TrainingRun::save() {
  if (options_.servers && !save_servers()) return;
  checkpoints_.save_last(state_now(), updater_->parts(Replicated::kOnce));
  saved_ = Clock::now();
  save_is_due_ = false;
}

// Until every rank has written the checkpoint that has begun. A save would else block on a rank that
// still writes, and the others would wait for it in a collective, which has a shorter time limit.
void TrainingRun::wait_for_save() {
  run_on_ranks(group_, "the checkpoint before", checkpoints_.saves(), kSaveLimit,
               [&] { checkpoints_.wait_written(); });
}

// Saves them where last/ will name. If it fails, last/ and the servers' earlier folder stay.
bool TrainingRun::save_servers() {
  servers_failed_ = nullptr;
  const auto folder = std::filesystem::absolute(options_.model_dir) / "servers";
  const std::string path = folder / ("update-" + std::to_string(state_.updates));
  try {
    updater_->save_servers(path);
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    log_.error("a checkpoint was not written", {{"why", one_line(error)}});
    servers_failed_ = std::current_exception();
    saved_ = Clock::now();
    save_is_due_ = false;
    return false;
  }
  state_.servers = path;
  return true;
}

void TrainingRun::check_servers_saved() {
  run_on_ranks(group_, "the servers' checkpoint", true, kSaveLimit, [&] {
    if (servers_failed_) std::rethrow_exception(servers_failed_);
  });
}

void TrainingRun::save_if_due() {
  // With servers all ranks take part, of which one knows what it still writes.
  if (save_is_due_ && (options_.servers || !checkpoints_.pending())) save();
}

// Whether --valid-freq wants a validation after the update that was made last, and it has not been.
bool TrainingRun::is_valid_update() const {
  return options_.valid_freq_updates > 0 && state_.updates % options_.valid_freq_updates == 0 &&
         state_.token_sum > 0;
}

// Every rank comes to the same conclusion: all hold the same state.
void TrainingRun::check_goals() {
  if (options_.after_epochs > 0 && state_.epoch >= options_.after_epochs)
    decide_to_stop("reached --after-epochs " + std::to_string(options_.after_epochs));
  if (options_.after_batches > 0 && state_.updates >= options_.after_batches)
    decide_to_stop("reached --after-batches " + std::to_string(options_.after_batches));
  if (early_stopping_.should_stop()) {
    decide_to_stop("no better " + to_string(options_.valid_metrics.front()) + " in " +
                   std::to_string(options_.early_stopping) + " validations");
  }
}

TrainingResult TrainingRun::loop() {
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

TrainingResult TrainingRun::result() const {
  return {.stop_reason = stop_reason_,
          .was_asked_to = was_asked_to_stop_,
          .epochs = state_.epoch,
          .updates = state_.updates,
          .best = state_.best};
}

void TrainingRun::run() {
  model_->train();
  if (state_.updates == 0) {
    save();
    wait_for_save();
    // A run that is killed in its first update can resume, too, and one that cannot save does not begin.
    run_on_ranks(group_, "the first checkpoint", checkpoints_.saves(), kSaveLimit,
                 [&] { checkpoints_.finish_first_save(); });
    check_servers_saved();
    if (options_.valid_on_start && !state_now().is_validated()) {
      validate();
      wait_for_save();
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
  wait_for_save();
  save();
  for (const auto& step : {&RunCheckpoints::wait_written, &RunCheckpoints::finish})
    run_on_ranks(group_, "last checkpoint", checkpoints_.saves(), kSaveLimit,
                 [&] { (checkpoints_.*step)(); });
  check_servers_saved();
  take_best_scores();
  updater_->finish();
  const std::string best = "best_" + to_string(options_.valid_metrics.front());
  log_.info("end", {{"reason", stop_reason_},
                    {"epochs", state_.epoch},
                    {"updates", state_.updates},
                    {best, early_stopping_.state().best},
                    {"minutes", seconds() / 60}});
  profiler_.finish();
}

// A run that was killed after a validation and resumed with other options may not have come to
// weights as good as those in best/.
void TrainingRun::take_best_scores() {
  const BestScores there = checkpoints_.read_best(group_);
  if (!there.scores || there.update == state_.best_update) return;
  log_.warn("best/ stays: it is better than every validation of this run since it resumed",
            {{"best_update", there.update}});
  state_.best = there.scores;
}

data::BatchOptions TrainingRun::batch_options() const {
  return {.mini_batch = options_.mini_batch,
          .mini_batch_words = options_.mini_batch_words,
          .fit_rows = options_.mini_batch_fit ? state_.fit_rows : std::vector<int64_t>{},
          .maxi_batch = options_.maxi_batch,
          .optimizer_delay = options_.optimizer_delay,
          .seed = options_.seed,
          .rank = data_group_.rank(),
          .world_size = data_group_.size()};
}

bool TrainingRun::train_epoch() {
  const data::BatchOptions options = batch_options();
  const auto plan =
      data::plan_rest(data_.train.corpus.lengths(), options, state_.epoch, state_.trained);
  if (state_.trained.empty() || !data::same_plan(state_.trained.back().options, options)) {
    if (!state_.trained.empty())
      log_.info("the rest of the epoch is planned again: ranks, batch sizes or seed have changed",
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
      update.num_tokens += plan.step_target_tokens[next];
      update.batches.push_back(make_batch(data_.train.corpus, sentences));
      if (!group_.device().is_cpu()) update.batches.back() = pinned(update.batches.back());
      update.sentences.insert(update.sentences.end(), sentences.begin(), sentences.end());
    }
    return update;
  });
  while (const auto next_update = loader.next()) {
    num_trained += std::ssize(next_update->batches);
    update(*next_update, ++step, num_steps);
    if (async_sum_ && (is_sync_point() || time_is_up_ || is_asked_)) synchronize(is_sync_point());
    if (is_valid_update() && stop_reason_.empty()) {
      validate();
      check_goals();
    }
    if (options_.save_interval_updates > 0 && !state_.skipped_in_a_row &&
        state_.updates % options_.save_interval_updates == 0) {
      if (!async_sum_) wait_for_save();
      checkpoints_.save_kept(state_now(), updater_->parts(Replicated::kOnce));
    }
    if (!stop_reason_.empty()) {
      progress_.finish();  // before anything else is said
      // A run that was asked to stop ends the epoch, with its validation, when it resumes.
      return step == num_steps && !was_asked_to_stop_;
    }
    if (step < num_steps) save_if_due();  // the epoch's end validates first
  }
  progress_.finish();
  return true;
}

bool TrainingRun::is_save_due() const {
  return options_.save_freq_min > 0 && seconds_since(saved_) > 60 * options_.save_freq_min;
}

// By rank 0's clock.
bool TrainingRun::is_time_up() const {
  return group_.rank() == 0 && options_.time_limit_min > 0 &&
         seconds() > 60 * options_.time_limit_min;
}

// Batches of all lengths leave holes of all lengths.
void TrainingRun::release_grown_memory() {
  if (memory_growth_.has_grown(private_resident_bytes())) release_free_memory();
}

void TrainingRun::report_validation(const ValidScores& scores, double train_loss,
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

// A line for each GPU of each host.
void TrainingRun::report_gpus(const std::vector<std::string>& gpu_use) const {
  for (size_t rank = 0; rank < gpu_use.size(); ++rank) {
    const std::vector<GpuUseSummary> gpus = parse_gpu_use(gpu_use[rank]);
    for (size_t i = 0; i < gpus.size(); ++i) {
      log_.info("gpu", {{"host_of_rank", rank},
                        {"gpu", i},
                        {"busy_percent", gpus[i].percent.mean},
                        {"busy_percent_peak", gpus[i].percent.peak},
                        {"memory_gib", gpus[i].memory_gib.mean},
                        {"memory_gib_peak", gpus[i].memory_gib.peak}});
    }
  }
}

Evaluation TrainingRun::evaluate_valid_text() {
  EvaluationOptions options = options_.evaluation;
  train::Progress progress;  // of its own: the epoch's clock runs on
  if (group_.rank() == 0 && !options_.quiet) {
    options.on_batch = [&](int64_t done, int64_t total) {
      progress.update({.phase = "validation", .step = done, .num_steps = total});
    };
  }
  Evaluation evaluation = evaluate(model_, data_.valid, data_.valid_text.target,
                                   data_.tokenizers.target, data_group_, options);
  progress.finish();
  return evaluation;
}

void TrainingRun::validate() {
  const auto start = Clock::now();
  progress_.clear();
  updater_->wait_for_updates();
  const auto gpu_use = group_.gather_object(gpu_watch_.take());
  // Not a number before the first update: 0 / 0.
  const double train_loss = state_.loss_sum / static_cast<double>(state_.token_sum);
  const double train_seconds = state_.train_seconds;
  const double tokens_per_s = static_cast<double>(state_.token_sum) / train_seconds;
  state_.loss_sum = 0;
  state_.token_sum = 0;
  state_.train_seconds = 0;
  // Scored and saved as they are used later.
  const optim::AveragesInPlace smoothed(updater_->average());
  const auto whole = updater_->model().unsharded();
  const Evaluation evaluation = evaluate_valid_text();
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
  log_.info("seconds", {{"training", train_seconds},
                        {"validation", evaluation.loss_seconds},
                        {"translation", evaluation.translate_seconds}});
  report_gpus(gpu_use);
  if (improved) {
    wait_for_save();
    checkpoints_.save_best(state_now(), updater_->parts(Replicated::kOnce).at("weights"));
  }
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
  memory_growth_.restart();
  group_.barrier("validation");
}

TrainingResult train(const TrainingOptions& given, const comm::ProcessGroup& group) {
  TrainingOptions options = resolve(given);
  const parallel::DeviceMesh mesh = parallel::init_strategy_mesh(
      group, options.strategy, static_cast<int>(options.tensor_parallel));
  ValidText valid_text = read_valid_text(options);  // before anything is written
  train::check_same_on_ranks(group, "--valid-sets", "text", valid_text.sha256);
  Fd held_folder;
  std::string decision, precision_of_last;
  run_on_ranks(group, "the run's folder", group.rank() == 0, kFolderLimit, [&] {
    held_folder = train::hold_folder("--model-dir", options.model_dir);
    decision = find_start(options) == Start::kResume ? "resume" : "fresh";
    if (decision == "resume") precision_of_last = stored_precision(options.model_dir);
  });
  const Start start = group.broadcast_object(decision) == "resume" ? Start::kResume : Start::kFresh;
  // A choice that is measured may turn out otherwise the next time: it is the run's.
  precision_of_last = group.broadcast_object(precision_of_last);
  const bool keeps_precision = !options.precision && !precision_of_last.empty();
  if (keeps_precision) {
    options.precision = nmt::parse_precision(precision_of_last);
    run_on_ranks(group, "the run's precision", true, kFolderLimit,
                 [&] { nmt::check_precision(*options.precision, group.device().is_cpu()); });
  }
  options.precision = agreed_precision(options.precision, group);
  RunData data = prepare_data(options, std::move(valid_text), start, group);
  return TrainingRun(options, start, std::move(data), mesh, keeps_precision).loop();
}

}  // namespace cohort::translate
