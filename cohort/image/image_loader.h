// SPDX-License-Identifier: Apache-2.0
// Decodes and transforms images on several threads while the network computes.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cohort/image/image_folder.h"
#include "cohort/image/transforms.h"

namespace cohort::image {

/// Images and their classes.
struct ImageBatch {
  at::Tensor images_BCHW{};  ///< float32, contiguous.
  at::Tensor labels_B{};     ///< int64.
};

enum class Transform { kTraining, kEvaluation };

/// What to do with a corrupt image. A file that the system does not let be read (UnreadableFile)
/// makes next() throw in either case. After an error next() continues with the next batch.
enum class OnDamage {
  kThrow,  ///< next() throws when it comes to the image's batch.
  kSkip,   ///< Its batch is one smaller; num_skipped() counts it.
};

struct ImageLoaderOptions {
  Transform transform = Transform::kTraining;
  TransformOptions transforms{};
  int num_threads = 4;        ///< > 0.
  int64_t batches_ahead = 2;  ///< Batches in memory that next() has not returned, > 0.
  uint64_t seed = 0;          ///< Same on all ranks.
  int64_t epoch = 0;
  OnDamage on_damage = OnDamage::kThrow;
  bool pin_memory = false;  ///< Batches are in pinned memory, for copies that do not wait.
};

/// Delivers the given batches in their order.
///
/// The random choices for an image depend on (seed, epoch, its number in the folder) alone: not on
/// the number of threads or ranks, or its position in a batch.
/// Owner:   refers to `folder`, which must outlive it.
/// Memory:  batches_ahead batches, and one image a thread.
/// Threads: one caller. The destructor waits for the images that are being decoded.
class ImageLoader {
 public:
  /// `batches` are numbers of images in `folder`, from DistributedSampler and cut_batches(); a
  /// number out of range is a std::out_of_range of next().
  /// Errors: c10::ValueError for an option out of range.
  ImageLoader(const ImageFolder& folder, std::vector<std::vector<int64_t>> batches,
              const ImageLoaderOptions& options);
  ~ImageLoader();
  ImageLoader(const ImageLoader&) = delete;
  ImageLoader& operator=(const ImageLoader&) = delete;

  /// Returns the next batch, or nothing after the last. Blocks until it is complete.
  /// Errors: ConfigError with the file's name: of the batch's corrupt images, the first in its
  ///         order.
  std::optional<ImageBatch> next();

  /// Returns how many images were left out of the batches returned so far.
  int64_t num_skipped() const;
  /// Returns how long next() has blocked so far, in total.
  std::chrono::nanoseconds waited() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::image
