// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/trainer.h"

#include <ATen/autocast_mode.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <torch/utils.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/data/distributed_sampler.h"
#include "cohort/parallel/model_state.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "cohort/ps/module/host_ranks.h"
#include "cohort/train/batch_rules.h"
#include "cohort/train/check_same.h"
#include "cohort/train/history.h"
#include "cohort/train/hold_folder.h"

namespace imagenet {
namespace {

using cohort::ConfigError;
using cohort::cli::counted;
using cohort::image::ImageBatch;
using cohort::image::ImageFolder;
using cohort::image::ImageLoader;
using cohort::image::Transform;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBaseBatch = 256;  // What --lr is meant for.

std::optional<at::ScalarType> autocast_type(const Options& options) {
  if (options.precision == "bfloat16") return at::kBFloat16;
  if (options.precision == "float16") return at::kHalf;
  return std::nullopt;
}

// Of parameters and inputs.
at::ScalarType scalar_type(const Options& options) {
  if (options.precision == "float64") return at::kDouble;
  if (options.precision == "float32" || autocast_type(options)) return at::kFloat;
  throw ConfigError("--precision " + options.precision +
                    ": expected float32, bfloat16, float16 or float64");
}

// As torch.autocast: convolutions and products are computed in a low precision while this lives.
class Autocast {
 public:
  Autocast(const Options& options, at::Device device)
      : type_(device.type()), on_(autocast_type(options).has_value()) {
    if (!on_) return;
    at::autocast::increment_nesting();
    dtype_ = at::autocast::get_autocast_dtype(type_);
    at::autocast::set_autocast_dtype(type_, *autocast_type(options));
    at::autocast::set_autocast_enabled(type_, true);
  }
  ~Autocast() {
    if (!on_) return;
    at::autocast::set_autocast_enabled(type_, false);
    at::autocast::set_autocast_dtype(type_, dtype_);
    // Casts of parameters that the next step changes.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType type_;
  const bool on_;
  at::ScalarType dtype_ = at::kBFloat16;  // Before.
};

ResNet make_model(const Options& options, int64_t num_classes,
                  const cohort::comm::ProcessGroup& group) {
  torch::manual_seed(options.seed);
  ResNet model(ResNetOptions{.arch = options.arch, .num_classes = num_classes});
  if (options.sync_bn) cohort::parallel::convert_sync_batchnorm(*model, group);
  model->to(group.device(), scalar_type(options));
  return model;
}

// Ranks that list other pictures would train some twice and others never, or wait for each other.
void check_same_pictures(const std::string& root, const cohort::image::ImageFolder& pictures,
                         const cohort::comm::ProcessGroup& group) {
  cohort::Sha256 names;
  for (int64_t i = 0; i < pictures.size(); ++i) {
    names.update(std::string_view(pictures.at(i).path).substr(root.size()));
    names.update(std::string_view("\n"));
  }
  cohort::train::check_same_on_ranks(group, root, "pictures", names.hex());
}

// Weights that are not numbers stay so: nothing that is trained on with them is worth saving.
void check_finite(double loss, const std::string& what, int64_t epoch) {
  TORCH_CHECK(std::isfinite(loss), "epoch ", epoch, ": the ", what, " loss is ", loss,
              ": expected a number; the training has diverged, so nothing of this epoch is saved: "
              "lower --lr, and resume from a checkpoint of an earlier epoch if there is one");
}

double seconds(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

Trainer::Trainer(const Options& options, const cohort::comm::ProcessGroup& group)
    : options_(options),
      group_(group),
      validation_set_(options.data + "/val"),
      local_batch_(options.batch_size_per_rank.value_or(0)),
      learning_rate_(options.lr),
      model_(make_model(options, std::ssize(validation_set_.classes()), group)) {
  if (!options.batch_size_per_rank) {
    // Only training needs batches of equal size.
    local_batch_ = options.evaluate ? std::max<int64_t>(1, options.batch_size / group.size())
                                    : cohort::train::local_batch(options.batch_size, group.size());
  }
  state_.arch = options.arch;
  if (!options.resume.empty()) {
    state_ = read_run(options.resume);
    if (state_.arch != options.arch) {
      throw ConfigError(options.resume + ": a checkpoint of " + state_.arch + ", not of --arch " +
                        options.arch);
    }
  }
  check_same_pictures(options.data + "/val", validation_set_, group);
  if (options.evaluate) {
    // Ranks with other weights would print one score of several models. The manifest has their checksums.
    cohort::train::check_same_on_ranks(group, "--resume", "weights",
                                       cohort::sha256_of_file(options.resume + "/manifest.json"));
    load_weights(options.resume, model_);
    return;
  }
  training_set_.emplace(options.data + "/train");
  check_same_pictures(options.data + "/train", *training_set_, group);
  if (training_set_->classes() != validation_set_.classes()) {
    throw ConfigError(options.data + ": expected folders of the same names in train and in val");
  }
  const auto rule = cohort::train::parse_learning_rate_rule(options.lr_rule);
  learning_rate_ =
      cohort::train::scaled_learning_rate(options.lr, kBaseBatch, global_batch(), rule);
  make_optimizer();
  make_scaler();
  if (!options.resume.empty()) resume();
  console_.print(
      "%s, %zu classes, %s; batch %lld on %s%s; learning rate %s; %s, %s\n", options.arch.c_str(),
      training_set_->classes().size(), counted(training_set_->size(), "picture").c_str(),
      static_cast<long long>(global_batch()), counted(group.size(), "rank").c_str(),
      group.size() > 1 ? (" over " + group.backend()).c_str() : "",
      cohort::train::describe_learning_rate(options.lr, kBaseBatch, global_batch(), rule).c_str(),
      options.precision.c_str(), options_.channels_last ? "channels last" : "contiguous");
}

void Trainer::make_optimizer() {
  const bool servers = cohort::ps::server_training(options_.strategy).has_value();
  // Servers have the gradients' sum; statistics of batches stay each rank's own until an epoch
  // ends.
  parallel_.emplace(
      model_, group_,
      cohort::parallel::StrategyOptions{
          .strategy = cohort::parallel::parse_strategy(servers ? "ddp" : options_.strategy),
          .ddp = {.broadcast_buffers = !servers},
          .sharding = {.cpu_offload = options_.cpu_offload}});
  const OptimizerOptions optimizer{.learning_rate = learning_rate_,
                                   .momentum = options_.momentum,
                                   .weight_decay = options_.weight_decay,
                                   .steps_per_epoch = std::ssize(training_batches(0))};
  optimizer_ = servers ? make_server_optimizer(*parallel_, group_, options_, optimizer, state_)
                       : make_rank_optimizer(*parallel_, optimizer);
}

// Small gradients vanish in float16, large ones overflow. The scale continues as the checkpoint has it;
// checkpoints of other precisions have none.
void Trainer::make_scaler() {
  if (options_.precision != "float16") {
    state_.loss_scale = 0;
    state_.scale_age = 0;
    return;
  }
  scaler_.emplace(group_, cohort::parallel::GradScalerOptions{.init_scale = options_.init_scale});
  if (state_.loss_scale == 0) return;
  for (auto& [name, value] : scaler_->state())
    value.fill_(name == "scale" ? state_.loss_scale : static_cast<double>(state_.scale_age));
}

void Trainer::resume() {
  const bool servers = cohort::ps::server_training(options_.strategy).has_value();
  if (servers && state_.servers.empty()) {
    throw ConfigError(options_.resume +
                      ": a checkpoint without servers, which hold the momentum: "
                      "expected no --strategy " +
                      options_.strategy);
  }
  if (!servers && !state_.servers.empty()) {
    throw ConfigError(options_.resume + ": its momentum is in " + state_.servers +
                      ": expected --strategy ps-sync or ps-async");
  }
  load_run(options_.resume, *parallel_, optimizer_->momentum(), group_);
  optimizer_->check_resumed(options_.resume, state_);
  console_.print("resumed from %s, %s done\n", options_.resume.c_str(),
                 counted(state_.epochs_done, "epoch").c_str());
}

cohort::image::ImageLoaderOptions Trainer::loader_options(Transform transform,
                                                          int64_t epoch) const {
  cohort::image::ImageLoaderOptions result{.transform = transform,
                                           .num_threads = options_.workers,
                                           .seed = options_.seed,
                                           .epoch = epoch,
                                           .pin_memory = !group_.device().is_cpu()};
  result.transforms.size = options_.image_size;
  result.transforms.resize = options_.image_size * 8 / 7;  // 256 for 224.
  if (options_.skip_damaged) result.on_damage = cohort::image::OnDamage::kSkip;
  return result;
}

ImageBatch Trainer::on_device(const ImageBatch& batch) const {
  const at::Device device = group_.device();
  const bool non_blocking = !device.is_cpu();
  at::Tensor images_BCHW = batch.images_BCHW.to(device, scalar_type(options_), non_blocking);
  if (options_.channels_last) images_BCHW = images_BCHW.contiguous(at::MemoryFormat::ChannelsLast);
  return {.images_BCHW = images_BCHW,
          .labels_B = batch.labels_B.to(device, at::kLong, non_blocking)};
}

Scores Trainer::evaluate() {
  const cohort::data::DistributedSampler sampler({.num_examples = validation_set_.size(),
                                                  .rank = group_.rank(),
                                                  .world_size = group_.size(),
                                                  .shuffle = false,
                                                  .tail = cohort::data::Tail::kUneven});
  ImageLoader loader(validation_set_, cohort::data::cut_batches(sampler.indices(), local_batch_),
                     loader_options(Transform::kEvaluation, 0));
  const at::NoGradGuard no_grad;
  std::optional<cohort::parallel::Unsharded> whole;
  if (parallel_) whole.emplace(*parallel_);
  model_->eval();
  ScoreSums sums;
  // Ranks have different numbers of batches: nothing in this loop communicates.
  while (const auto batch = loader.next()) {
    if (batch->labels_B.numel() == 0) continue;
    const auto [images_BCHW, labels_B] = on_device(*batch);
    const at::Tensor scores_BC = [&, &images = images_BCHW] {
      const Autocast autocast(options_, group_.device());
      return model_->forward(images);
    }();
    sums.add(losses_of(scores_BC.to(at::kDouble), labels_B), scores_BC, labels_B);
  }
  model_->train();
  const Scores scores = sums.scores(group_);
  console_.print("evaluated %s: loss %.8f top1 %.3f top5 %.3f\n",
                 counted(scores.count, "picture").c_str(), scores.loss, scores.top1, scores.top5);
  print_skipped("evaluation", loader);
  return scores;
}

std::vector<std::vector<int64_t>> Trainer::training_batches(int64_t epoch) const {
  // Whole global batches only: the ranks' batches of a step are then alike in size.
  cohort::data::DistributedSampler sampler({.num_examples = training_set_->size(),
                                            .rank = group_.rank(),
                                            .world_size = group_.size(),
                                            .seed = options_.seed,
                                            .tail = cohort::data::Tail::kDropLast});
  sampler.set_epoch(epoch);
  return cohort::data::cut_batches(sampler.indices(), local_batch_, cohort::data::LastBatch::kDrop);
}

// Returns whether the optimizer stepped: on no rank if a gradient of one overflowed.
bool Trainer::step(const at::Tensor& loss) {
  if (!scaler_) {
    loss.backward();
    optimizer_->step();
    return true;
  }
  scaler_->scale(loss).backward();
  const bool good = scaler_->unscale(parallel_->parameters());
  if (good) {
    optimizer_->step();
  } else {
    for (at::Tensor& parameter : parallel_->parameters()) parameter.mutable_grad().reset();
  }
  scaler_->update();
  for (const auto& [name, value] : scaler_->state()) {
    if (name == "scale") state_.loss_scale = value.item<double>();
    if (name == "growth_tracker") state_.scale_age = value.item<int64_t>();
  }
  return good;
}

EpochReport Trainer::train_epoch(int64_t epoch) {
  auto batches = training_batches(epoch);
  const auto num_steps = std::ssize(batches);
  optimizer_->begin_epoch(epoch);
  ImageLoader loader(*training_set_, std::move(batches),
                     loader_options(Transform::kTraining, epoch));
  ScoreSums sums;
  const auto start = Clock::now();
  const auto report = [&](const Scores& scores) {
    const double time = seconds(Clock::now() - start);
    return EpochReport{.scores = scores,
                       .images_per_s = static_cast<double>(scores.count) / time,
                       .wait_share = seconds(loader.waited()) / time};
  };
  int64_t step = 0;
  while (const auto batch = loader.next()) {
    profiler_.step();
    TORCH_CHECK_VALUE(batch->labels_B.numel() > 0, "epoch ", epoch, ", step ", step,
                      ": every picture of this rank's batch of ", local_batch_,
                      " is damaged: expected one good picture at least; without --skip-damaged the "
                      "run names the damaged file");
    const auto [images_BCHW, labels_B] = on_device(*batch);
    const at::Tensor scores_BC = [&, &images = images_BCHW] {
      const Autocast autocast(options_, group_.device());
      return (*parallel_)(images).to(scalar_type(options_));
    }();
    const at::Tensor losses_B = losses_of(scores_BC, labels_B);
    // Not the mean: a batch with pictures left out counts for what it has.
    if (!this->step(losses_B.sum() / local_batch_))
      console_.print("epoch %lld, step %lld left out: a gradient overflowed; loss scale now %g\n",
                     static_cast<long long>(epoch), static_cast<long long>(step),
                     state_.loss_scale);
    sums.add(losses_B, scores_BC, labels_B);
    if (++step % options_.print_freq == 0) {
      const EpochReport so_far = report(sums.scores());
      print_step(epoch, step, num_steps, so_far);
      // float16 overflows at times: such a step is left out.
      if (!scaler_) check_finite(so_far.scores.loss, "training", epoch);
    }
  }
  print_skipped("epoch " + std::to_string(epoch), loader);
  return report(sums.scores(group_));
}

// Collective; blocks.
void Trainer::print_skipped(const std::string& what, const ImageLoader& loader) {
  const int64_t skipped = group_.all_reduce_sum(loader.num_skipped());
  if (skipped > 0) {
    console_.print("%s: %s left out\n", what.c_str(), counted(skipped, "damaged picture").c_str());
  }
}

void Trainer::print_step(int64_t epoch, int64_t step, int64_t num_steps,
                         const EpochReport& so_far) const {
  const Scores& scores = so_far.scores;
  console_.print(
      "epoch %lld [%lld/%lld] loss %.4f top1 %.2f top5 %.2f, %.1f images/s, data %.1f %%\n",
      static_cast<long long>(epoch), static_cast<long long>(step),
      static_cast<long long>(num_steps), scores.loss, scores.top1, scores.top5,
      so_far.images_per_s * group_.size(), 100 * so_far.wait_share);
}

void Trainer::finish_epoch(int64_t epoch, const EpochReport& report) {
  optimizer_->wait_for_updates();
  // Plain batch normalisation keeps running statistics of each rank's own pictures: rank 0's are
  // the ones that are saved, so they are what all ranks evaluate.
  cohort::parallel::broadcast_tensors(model_->buffers(), group_, 0);
  const Scores valid = evaluate();
  if (valid.count > 0) check_finite(valid.loss, "validation", epoch);
  const bool best = valid.top1 > state_.best_top1;
  if (best) state_.best_top1 = valid.top1;
  state_.epochs_done = epoch + 1;
  optimizer_->save(state_);
  // The checkpoint comes last: killed before it, the run repeats the epoch, and this.
  if (group_.rank() == 0) add_to_history(epoch, report, valid);
  if (best) save_run(options_.output + "/model_best", *parallel_, optimizer_->momentum(), state_);
  save_run(options_.output + "/checkpoint", *parallel_, optimizer_->momentum(), state_);
  optimizer_->saved(state_);
}

void Trainer::add_to_history(int64_t epoch, const EpochReport& report, const Scores& valid) const {
  cohort::train::History(options_.output + "/history.jsonl", epoch - 1, {}, "epoch")
      .append({{"epoch", epoch},
               {"train_loss", report.scores.loss},
               {"train_top1", report.scores.top1},
               {"train_top5", report.scores.top5},
               {"valid_loss", valid.loss},
               {"valid_top1", valid.top1},
               {"valid_top5", valid.top5},
               {"images_per_s", report.images_per_s},
               {"wait_share", report.wait_share}});
}

// A folder that takes no checkpoint is named now, not after an epoch; so is an earlier training.
void Trainer::check_output() {
  try {
    cohort::make_writable_folder(options_.output);
  } catch (const ConfigError& error) {
    throw ConfigError("--output " + cohort::one_line(error));
  }
  held_output_ = cohort::train::hold_folder("--output", options_.output);
  if (!options_.resume.empty() || options_.overwrite) return;
  const std::string last = options_.output + "/checkpoint";
  if (!std::filesystem::exists(last + "/manifest.json")) return;
  throw ConfigError("--output " + options_.output + " holds a training: pass --resume " + last +
                    " to continue it, --overwrite to replace it, or name another folder");
}

void Trainer::train() {
  if (group_.rank() == 0) {  // The others meet rank 0 in the first step, or learn that it is gone.
    check_output();
  }
  if (training_set_->size() < global_batch()) {
    throw ConfigError("--batch-size: expected at most the pictures in " + options_.data +
                      "/train, " + std::to_string(training_set_->size()) + ", got batches of " +
                      std::to_string(global_batch()));
  }
  const int64_t first = options_.start_epoch.value_or(state_.epochs_done);
  if (first >= options_.epochs)
    console_.print("nothing to train: --epochs %lld, %s done\n",
                   static_cast<long long>(options_.epochs), counted(first, "epoch").c_str());
  for (int64_t epoch = first; epoch < options_.epochs; ++epoch) {
    finish_epoch(epoch, train_epoch(epoch));
  }
  optimizer_->finish();
  profiler_.finish();
}

}  // namespace imagenet
