// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/updater.h"

#include <algorithm>
#include <cmath>
#include <torch/types.h>

#include "cohort/comm/host_copy.h"
#include "cohort/train/sharded_checkpoint.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/run_on_ranks.h"

namespace cohort::translate {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

// The model registers both tables of embeddings first, but uses the target's after the encoder.
std::vector<std::string> forward_order(const nmt::TransformerImpl& model) {
  const std::string target = "target_embedding";
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters())
    if (item.key() != target) names.push_back(item.key());
  if (!model.named_parameters().contains(target)) return names;  // one table for both
  const auto decoder =
      std::ranges::find_if(names, [](const auto& name) { return name.starts_with("decoder."); });
  names.insert(decoder, target);
  return names;
}

parallel::StrategyOptions strategy_options(const UpdaterOptions& options,
                                           const nmt::TransformerImpl& model,
                                           const parallel::DeviceMesh& mesh) {
  const std::vector<std::string> order = forward_order(model);
  parallel::StrategyOptions strategy{.strategy = options.strategy,
                                     .ddp = {.broadcast_buffers = !options.servers,
                                             .gradient_as_bucket_view = true,
                                             .forward_order = order},
                                     .sharding = {.forward_order = order,
                                                  .cpu_offload = options.cpu_offload,
                                                  .fill = options.fill,
                                                  .fill_device = mesh.world().device()},
                                     .tensor_parallel = {}};
  if (mesh.has("tp")) strategy.tensor_parallel = tensor_parallel_plan(model);
  return strategy;
}

// Servers read or write some gigabytes.
constexpr std::chrono::minutes kServersLimit{30};

ps::SessionOptions session_options(const UpdaterOptions& options) {
  ps::SessionOptions session = *options.servers;
  const bool async = is_async(options.servers);
  TORCH_CHECK_VALUE(async || session.training == ps::Training::kSync,
                    "updater: expected servers to be sync or async");
  session.dense_rule = {
      .rule = ps::Rule::kAdam,
      .learning_rate = static_cast<float>(options.schedule.factor / (async ? session.trainers : 1)),
      .beta1 = static_cast<float>(options.adam.beta1),
      .beta2 = static_cast<float>(options.adam.beta2),
      .eps = static_cast<float>(options.adam.eps),
      .schedule = {.kind = ps::Schedule::Kind::kNoam,
                   .warmup = static_cast<double>(options.schedule.warmup),
                   .width = static_cast<double>(options.schedule.width)}};
  return session;
}

bool is_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace

bool is_async(const std::optional<ps::SessionOptions>& servers) {
  return servers && servers->training == ps::Training::kAsync;
}

Updater::Updater(nmt::Transformer model, const comm::ProcessGroup& group,
                 const UpdaterOptions& options)
    : options_(options),
      mesh_(options.mesh ? options.mesh : parallel::init_strategy_mesh(group, options.strategy)),
      group_(parallel::data_axes(mesh_).group()),
      model_(std::move(model)),
      parallel_(model_, mesh_, strategy_options(options, *model_, mesh_), model_->layers()),
      upload_(group_.device()) {
  TORCH_CHECK_VALUE(model_->tensor_parallel()->count() == (mesh_.has("tp") ? mesh_.size("tp") : 1),
                    "updater: a model in ", model_->tensor_parallel()->count(),
                    " shards: expected a mesh with as many ranks to a model");
  TORCH_CHECK_VALUE(
      !options.servers || (options.strategy == parallel::Strategy::kDdp && !mesh_.has("tp")),
      "updater: servers need a model that is whole on each rank");
  set_up_layers(model_, options.gradient_checkpointing);
  for (const auto& [name, tensor] : parallel_.named_parameters()) trained_.push_back(tensor);
  if (options.servers) {
    session_.emplace(session_options(options));
    session_->add("model", *model_);
    start_session();
  } else {
    adam_.emplace(parallel_.named_parameters(), options.adam);
  }
  if (options.exponential_smoothing > 0) {
    average_ = std::make_unique<optim::ExponentialAverage>(trained_, options.exponential_smoothing);
  }
  watch_gradients();
}

// Trainer 0 alone sends the servers back, before the others join.
void Updater::start_session() {
  if (!options_.servers->client.restore) return session_->start();
  run_on_ranks(group_, "servers go back", group_.rank() == 0, kServersLimit,
               [this] { session_->start(); });
  if (group_.rank() != 0) session_->start();
}

// backward returns when all ranks' gradients are there, so it cannot say when this rank's were.
void Updater::watch_gradients() {
  for (const at::Tensor& parameter : model_->parameters()) {
    hooks_.emplace_back(parameter, parameter.register_hook([this](const at::Tensor&) {
      last_gradient_ = Clock::now();
    }));
  }
}

Updater::~Updater() {
  for (auto& [parameter, hook] : hooks_) parameter.remove_hook(hook);
}

train::ShardedParts Updater::parts(Replicated replicated) {
  const std::vector<train::TensorShard> weights = train::shards_of(parallel_.local_shards());
  train::ShardedParts parts{{"weights", weights}};
  if (adam_) parts["optimizer"] = train::shards_like(weights, adam_->state());
  if (average_) {
    parts["average"] = weights;
    for (size_t i = 0; i < weights.size(); ++i)
      parts["average"][i].tensor = average_->averages()[i];
  }
  if (const auto& layout = parallel_.ranks().tensor_parallel)
    for (auto& [part, shards] : parts) shards = layout->full_model_shards(shards, replicated);
  return parts;
}

void Updater::set_num_updates(int64_t num_updates) {
  num_updates_ = num_updates;
  if (adam_) adam_->set_num_steps(num_updates);
  if (average_) average_->set_num_updates(num_updates);
}

// Not finite if any rank's is not.
double Updater::root_mean_square(double norm) {
  at::Tensor sum = at::full({1}, norm * norm, at::kDouble);
  group_.all_reduce(sum);
  return std::sqrt(sum.item<double>() / group_.size());
}

void Updater::apply(double gradient_factor) {
  ++num_updates_;
  const ProfileScope scope("Optimizer.step");
  if (adam_) {
    adam_->step(learning_rate(), gradient_factor);
  } else {
    for (at::Tensor& parameter : trained_)
      if (gradient_factor != 1 && parameter.grad().defined())
        parameter.mutable_grad().mul_(gradient_factor);
    session_->push();
    session_->pull();
  }
  if (average_) average_->update();
}

void Updater::forget_gradients() {
  for (at::Tensor& parameter : trained_) parameter.mutable_grad() = at::Tensor();
}

void Updater::wait_for_updates() {
  if (!session_) return;
  session_->flush();
  group_.barrier("last pushes");
  session_->pull();
}

void Updater::save_servers(const std::string& folder) {
  if (!session_) return;
  if (is_async(options_.servers)) {
    if (group_.rank() == 0) session_->save(folder);
    return;
  }
  run_on_ranks(group_, "checkpoint of servers", group_.rank() == 0, kServersLimit,
               [&] { session_->save(folder); });
}

void Updater::finish() {
  if (session_) session_->finish();
}

double Updater::learning_rate() const {
  return options_.schedule.at(num_updates());
}

// Leaves the mean over ranks of sum(loss) * weight as gradients; returns this rank's sum of losses
// without smoothing, where the model is.
at::Tensor Updater::accumulate_gradients(const std::vector<nmt::Batch>& batches, double weight) {
  at::Tensor nll_sum = at::zeros({}, at::TensorOptions(group_.device()).dtype(at::kDouble));
  upload_.start(batches.front());
  const auto forward = [&](size_t index) {
    const ProfileScope scope("forward");
    const nmt::Batch batch = upload_.take();
    if (index + 1 < batches.size()) upload_.start(batches[index + 1]);
    return parallel_(batch);
  };
  const auto run = [&](size_t index) {
    batch_ = static_cast<int64_t>(index);
    // Named by the batch's number in the whole update, so it matters not which rank computes it.
    const auto number = static_cast<uint64_t>(index) * static_cast<uint64_t>(group_.size()) +
                        static_cast<uint64_t>(group_.rank());
    model_->set_dropout_stream({.seed = options_.seed * 1000003 + number,
                                .call = static_cast<uint64_t>(num_updates()) << 20});
    const auto [loss, nll] = forward(index);
    const ProfileScope scope("backward");
    // 0 times a loss that is not finite is NaN: it makes the gradients so, and all ranks see it in
    // them, without an exchange of its own.
    loss.backward(at::full_like(loss, weight) + (nll.detach() * 0).to(loss));
    nll_sum.add_(nll.detach());
  };
  for (size_t i = 0; i < batches.size(); ++i) {
    std::optional<parallel::NoSync> guard;
    if (session_ || i + 1 < batches.size()) guard.emplace(parallel_);
    run(i);
  }
  return nll_sum;
}

// What each rank found, by rank; asynchronous ranks tell nobody, and nobody asks them.
std::vector<std::string> Updater::found_by_all(const std::string& own) {
  if (!is_async(options_.servers)) return everyone().all_gather_object(own);
  std::vector<std::string> found(static_cast<size_t>(group_.size()));
  found[static_cast<size_t>(group_.rank())] = own;
  return found;
}

// Where gradients are sharded, only the ranks that hold a part of the bad one see it.
std::string Updater::first_bad_sum() {
  std::string own;
  for (const auto& shard : parallel_.local_shards()) {
    const at::Tensor& gradient = shard.tensor.grad();
    if (!own.empty() || !gradient.defined() || is_finite(gradient)) continue;
    own = shard.name;
  }
  for (const std::string& found : found_by_all(own))
    if (!found.empty()) return found;
  return "";
}

// The gradients that are there are all ranks' sum. The same computation once more, with hooks that
// see this rank's share of it, says whose the bad number is; all strategies can do that.
BadNumber Updater::find_bad_number(const std::vector<nmt::Batch>& batches, double weight) {
  const std::string in_sum = first_bad_sum();
  forget_gradients();
  BadNumber own;
  std::vector<std::pair<at::Tensor, unsigned>> hooks;
  for (const auto& item : model_->named_parameters()) {
    const auto look = [&own, this, name = item.key()](const at::Tensor& gradient) {
      if (own.batch < 0 && !is_finite(gradient)) own = {everyone().rank(), batch_, name};
    };
    hooks.emplace_back(item.value(), item.value().register_hook(look));
  }
  accumulate_gradients(batches, weight);
  for (auto& [parameter, hook] : hooks) parameter.remove_hook(hook);
  const auto found =
      found_by_all(own.batch < 0 ? "" : std::to_string(own.batch) + " " + own.parameter);
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].empty()) continue;
    return {static_cast<int>(rank), std::stoll(found[rank]),
            found[rank].substr(found[rank].find(' ') + 1)};
  }
  return {.parameter = in_sum};
}

UpdateReport Updater::update(const std::vector<nmt::Batch>& batches,
                             std::optional<int64_t> num_tokens) {
  TORCH_CHECK_VALUE(!batches.empty(), "update: expected one batch or more");
  UpdateReport report;
  for (const auto& batch : batches) report.own_tokens += batch.num_target_tokens;
  const bool alone = is_async(options_.servers);
  if (alone) num_tokens = report.own_tokens;
  report.num_tokens = num_tokens ? *num_tokens : group_.all_reduce_sum(report.own_tokens);
  const auto start = Clock::now();
  // DDP divides by the world size; this makes the sum over ranks a mean over the update's tokens.
  const double weight =
      static_cast<double>(alone ? 1 : group_.size()) / static_cast<double>(report.num_tokens);
  comm::HostCopy nll_sum(accumulate_gradients(batches, weight));
  const auto all_gradients = Clock::now();
  // On a device a hook says when the host had queued a gradient's work: the whole step counts.
  const bool on_cpu = group_.device().is_cpu();
  const double waiting = on_cpu ? seconds_between(last_gradient_, all_gradients) : 0;
  const double norm = parallel_.gradient_norm();
  report.nll_sum = nll_sum.wait().item<double>();  // It has come before the norm.
  report.gradient_norm = session_ && !alone ? root_mean_square(norm) : norm;
  // The gradients, or with servers in step this number, are over all ranks by now: one rank's bad
  // number is in everybody's.
  report.skipped = !std::isfinite(report.gradient_norm);
  if (report.skipped) {
    report.bad = find_bad_number(batches, weight);
    if (alone) ++num_updates_;
  } else {
    const bool clip = options_.clip_norm > 0 && norm > options_.clip_norm;
    apply(clip ? options_.clip_norm / norm : 1);
  }
  forget_gradients();
  report.compute_seconds = seconds_between(start, Clock::now()) - waiting;
  return report;
}

}  // namespace cohort::translate
