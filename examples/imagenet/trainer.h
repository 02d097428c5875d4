// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet on a folder of images, on all ranks of a group.
#pragma once
#include <memory>
#include <optional>

#include "cohort/base/console.h"
#include "cohort/base/fd.h"
#include "cohort/comm/process_group.h"
#include "cohort/image/image_folder.h"
#include "cohort/image/image_loader.h"
#include "cohort/parallel/grad_scaler.h"

#include "examples/imagenet/checkpoint.h"
#include "examples/imagenet/optimizer.h"
#include "examples/imagenet/options.h"
#include "examples/imagenet/resnet.h"
#include "examples/imagenet/scores.h"

namespace imagenet {

/// Results of an epoch of training.
struct EpochReport {
  Scores scores;  ///< Of the images as they came, before each step.
  double images_per_s = 0;
  double wait_share = 0;  ///< Of the epoch's time, spent waiting for images; in [0, 1].
};

/// One run: model, optimizer and data.
///
/// Every rank draws the same parameters from the seed and takes its share of each global batch; the
/// gradient is that of the mean over the global batch; of ps-async, over the rank's own share.
/// Owner:      `options` must outlive it.
/// Threads:    one.
/// Collective: constructor, evaluate() and train(). Rank 0 alone prints and writes.
/// Errors:     ConfigError for flags, files and images; PeerError when a rank is lost.
class Trainer {
 public:
  Trainer(const Options& options, const cohort::comm::ProcessGroup& group);

  /// Returns the scores over val/, each image counted once, whatever the number of ranks.
  Scores evaluate();
  /// Trains to options.epochs; evaluates and saves after each epoch. Leaves the servers, if there
  /// are any.
  void train();

 private:
  void check_output();
  EpochReport train_epoch(int64_t epoch);
  std::vector<std::vector<int64_t>> training_batches(int64_t epoch) const;
  void finish_epoch(int64_t epoch, const EpochReport& report);
  void add_to_history(int64_t epoch, const EpochReport& report, const Scores& valid) const;
  void print_skipped(const std::string& what, const cohort::image::ImageLoader& loader);
  void print_step(int64_t epoch, int64_t step, int64_t num_steps, const EpochReport& so_far) const;
  cohort::image::ImageLoaderOptions loader_options(cohort::image::Transform transform,
                                                   int64_t epoch) const;
  cohort::image::ImageBatch on_device(const cohort::image::ImageBatch& batch) const;
  void make_optimizer();
  void make_scaler();
  bool step(const at::Tensor& loss);
  void resume();
  int64_t global_batch() const { return local_batch_ * group_.size(); }

  const Options& options_;
  cohort::comm::ProcessGroup group_;
  cohort::Console console_{group_.rank()};
  std::optional<cohort::image::ImageFolder> training_set_;  // None with --evaluate.
  cohort::image::ImageFolder validation_set_;
  int64_t local_batch_;
  double learning_rate_;  // Of epoch 0.
  ResNet model_;
  std::optional<Model> parallel_;                       // None with --evaluate, ...
  std::unique_ptr<Optimizer> optimizer_;                // ... this neither.
  std::optional<cohort::parallel::GradScaler> scaler_;  // Of float16.
  RunState state_;
  cohort::Fd held_output_;  // Of rank 0.
  cohort::Profiler profiler_{options_.profile, group_.rank(), group_.size()};
};

}  // namespace imagenet
