// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "cohort/base/error.h"
#include "cohort/translate/training_run.h"

namespace cohort::translate {

void TrainingRun::update(const Update& update, int64_t step, int64_t num_steps) {
  profiler_.step();
  const auto start = Clock::now();
  // Of the ranks that compute a model together, one counts.
  const bool is_counted = !tensor_group_ || tensor_group_.rank() == 0;
  const UpdateReport own = updater_->update(update.batches, update.num_tokens);
  state_.updates = updater_->num_updates();
  gpu_watch_.sample_if_due();
  if (is_counted && !(async_sum_ && own.skipped)) {
    own_.loss_sum += own.nll_sum;
    own_.tokens += static_cast<double>(own.own_tokens);
  }
  const auto rank = static_cast<size_t>(data_group_.rank());
  const auto own_tokens = static_cast<double>(own.own_tokens);
  own_.rank_tokens_per_s[rank] = is_counted ? own_tokens / own.compute_seconds : 0;
  own_.rank_losses[rank] = is_counted ? own.nll_sum / own_tokens : 0;
  if (async_sum_) {
    exchange_in_background(update, own);
  } else {
    exchange_votes(update, own);
  }
  const double update_seconds = seconds_since(start);
  state_.train_seconds += update_seconds;
  release_grown_memory();
  if (group_.rank() == 0) report_trained(own, step, num_steps, update_seconds);
}

// Loss and tokens count once.
StepVotes TrainingRun::own_votes() {
  StepVotes votes = own_;
  votes.time_is_up = is_time_up();
  votes.is_asked_to_stop = stop_request_.signal() != 0;
  votes.is_save_due = group_.rank() == 0 && is_save_due();
  votes.is_writing = checkpoints_.writing();
  own_.loss_sum = own_.tokens = 0;
  return votes;
}

void TrainingRun::take_votes(const StepVotes& all) {
  time_is_up_ = time_is_up_ || all.time_is_up;
  is_asked_ = is_asked_ || all.is_asked_to_stop;
  rank_speeds_ = all.rank_tokens_per_s;
  rank_losses_ = all.rank_losses;
}

void TrainingRun::exchange_votes(const Update& update, const UpdateReport& own) {
  at::Tensor packed = at::tensor(own_votes().pack(), at::kDouble);
  group_.all_reduce(packed);
  const StepVotes all =
      StepVotes::unpack({packed.const_data_ptr<double>(), static_cast<size_t>(packed.numel())});
  take_votes(all);
  loss_sum_ = all.loss_sum;
  if (own.skipped) {
    report_skipped(update, own.bad, loss_sum_ / static_cast<double>(own.num_tokens));
  } else {
    state_.skipped_in_a_row = 0;
    state_.loss_sum += all.loss_sum;
    state_.token_sum += own.num_tokens;
  }
  save_is_due_ = all.is_save_due;
  if (!all.is_writing) checkpoints_.finish_save();
  conclude(/*at_one_update=*/true);
}

// With ps-async. Rank 0 alone saves. This rank knows at once why the run ends here; the others
// learn it from a round that they have taken part in.
void TrainingRun::exchange_in_background(const Update& update, const UpdateReport& own) {
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
  is_asked_ = is_asked_ || stop_request_.signal() != 0;
}

// With ps-async, where all ranks synchronize: after the same number of updates.
bool TrainingRun::is_sync_point() const {
  return (options_.valid_freq_updates > 0 && state_.updates % options_.valid_freq_updates == 0) ||
         (options_.after_batches > 0 && state_.updates >= options_.after_batches);
}

// With ps-async. Ranks also synchronize when they learn that the run is to stop: then they are at
// different updates, and the conclusion must not depend on the update.
void TrainingRun::synchronize(bool is_planned) {
  const auto start = Clock::now();
  async_sum_->synchronize();
  const bool at_one_update = group_.all_reduce_sum(is_planned ? 1 : 0) == group_.size();
  const double waited = seconds_since(start);
  state_.train_seconds += waited;
  if (record_) record_->trained_elsewhere(0, 0, waited);
  conclude(at_one_update);
}

// Every rank comes to the same conclusion: all have the same votes.
void TrainingRun::conclude(bool at_one_update) {
  if (time_is_up_) decide_to_stop("reached the time limit");
  if (at_one_update) check_goals();
  if (is_asked_ && stop_reason_.empty()) {
    decide_to_stop("asked to stop by a signal; the same command resumes");
    was_asked_to_stop_ = true;
  }
}

void TrainingRun::report_trained(const UpdateReport& own, int64_t step, int64_t num_steps,
                                 double seconds) {
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
                    .rank_losses = rank_losses_,
                    .tokens_per_s = async_sum_ ? std::nullopt : std::optional(tokens / seconds)});
}

// All ranks know which rank's number it was and log the same line, rank 0 on the terminal; with
// ps-async that rank alone logs it. After too many in a row the run ends, and last/ is what it was
// before the first of them or between two.
void TrainingRun::report_skipped(const Update& update, const BadNumber& bad, double loss) {
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

}  // namespace cohort::translate
