#include "cohort/translate/updater.h"

#include <cmath>
#include <torch/types.h>

namespace cohort::translate {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

Updater::Updater(nmt::Transformer model, comm::ProcessGroup& group, const UpdaterOptions& options)
    : options_(options),
      group_(group),
      model_(std::move(model)),
      ddp_(model_, group, {.gradient_as_bucket_view = true}),
      adam_(optim::named_parameters(*model_)) {
  if (options.exponential_smoothing > 0) {
    average_ = std::make_unique<optim::ExponentialAverage>(adam_.parameters(),
                                                           options.exponential_smoothing);
  }
  watch_gradients();
}

// backward returns when all ranks' gradients are there, so it cannot say when this rank's were.
void Updater::watch_gradients() {
  for (const at::Tensor& parameter : adam_.parameters()) {
    hooks_.push_back(
        parameter.register_hook([this](const at::Tensor&) { last_gradient_ = Clock::now(); }));
  }
}

Updater::~Updater() {
  for (size_t i = 0; i < hooks_.size(); ++i) adam_.parameters()[i].remove_hook(hooks_[i]);
}

train::Parts Updater::parts() {
  train::Parts parts{{"weights", train::state_of(*model_)}, {"optimizer", adam_.state()}};
  if (average_) {
    const auto named = optim::named_parameters(*model_);
    for (size_t i = 0; i < named.size(); ++i)
      parts["average"].emplace_back(named[i].first, average_->averages()[i]);
  }
  return parts;
}

void Updater::set_num_updates(int64_t num_updates) {
  adam_.set_num_steps(num_updates);
  if (average_) average_->set_num_updates(num_updates);
}

double Updater::learning_rate() const {
  return options_.schedule.at(num_updates());
}

// Leaves the mean over ranks of sum(loss) * weight as gradients; returns this rank's sum of losses
// without smoothing.
double Updater::accumulate_gradients(const std::vector<nmt::Batch>& batches, double weight) {
  double nll_sum = 0;
  const auto run = [&](size_t index) {
    // Named by the batch's number in the whole update, so it matters not which rank computes it.
    const auto number = static_cast<uint64_t>(index) * static_cast<uint64_t>(group_.size()) +
                        static_cast<uint64_t>(group_.rank());
    model_->set_dropout_stream({.seed = options_.seed * 1000003 + number,
                                .call = static_cast<uint64_t>(num_updates()) << 20});
    const auto [loss, nll] = ddp_(batches[index]);
    ddp_.backward(loss, at::full_like(loss, weight));
    nll_sum += nll.item<double>();
  };
  for (size_t i = 0; i + 1 < batches.size(); ++i) {
    const auto guard = ddp_.no_sync();
    run(i);
  }
  run(batches.size() - 1);
  return nll_sum;
}

std::string Updater::first_bad_gradient() const {
  for (const auto& item : model_->named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    if (gradient.defined() && !at::isfinite(gradient).all().item<bool>()) return item.key();
  }
  return "";
}

UpdateReport Updater::update(const std::vector<nmt::Batch>& batches) {
  TORCH_CHECK_VALUE(!batches.empty(), "update: expected one batch or more");
  UpdateReport report;
  for (const auto& batch : batches) report.own_tokens += batch.num_target_tokens;
  report.num_tokens = group_.all_reduce_sum(report.own_tokens);
  const auto start = Clock::now();
  // DDP divides by the world size; this makes the sum over ranks a mean over the update's tokens.
  report.nll_sum = accumulate_gradients(
      batches, static_cast<double>(group_.size()) / static_cast<double>(report.num_tokens));
  const auto all_gradients = Clock::now();
  const double waiting = seconds_between(last_gradient_, all_gradients);
  report.gradient_norm = std::sqrt(optim::gradient_norm_squared(adam_.parameters()));
  // The gradients are means over ranks by now: one rank's bad number is in everybody's.
  report.skipped = !std::isfinite(report.gradient_norm);
  if (report.skipped) {
    report.bad_gradient = first_bad_gradient();
  } else {
    const bool clip = options_.clip_norm > 0 && report.gradient_norm > options_.clip_norm;
    adam_.step(options_.schedule.at(num_updates() + 1),
               clip ? options_.clip_norm / report.gradient_norm : 1);
    if (average_) average_->update();
  }
  adam_.zero_grad();
  report.compute_seconds = seconds_between(start, Clock::now()) - waiting;
  return report;
}

}  // namespace cohort::translate
