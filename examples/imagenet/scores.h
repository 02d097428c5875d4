// SPDX-License-Identifier: Apache-2.0
// Loss and accuracy of a network's scores.
#pragma once
#include <ATen/core/Tensor.h>
#include <array>
#include <cstdint>

#include "cohort/comm/process_group.h"

namespace imagenet {

/// Means over images; NaN without any.
struct Scores {
  int64_t count = 0;
  double loss = 0;  ///< Mean cross-entropy.
  double top1 = 0;  ///< Percent.
  double top5 = 0;  ///< Percent.
};

/// Returns the cross-entropy of each image.
at::Tensor losses_of(const at::Tensor& scores_BC, const at::Tensor& labels_B);

/// Sums over images, in float64, where the scores are.
class ScoreSums {
 public:
  /// `losses_B` are losses_of(scores_BC, labels_B), in any floating type. The host does not wait.
  void add(const at::Tensor& losses_B, const at::Tensor& scores_BC, const at::Tensor& labels_B);

  /// Returns the scores over what was added here ...
  Scores scores() const;
  /// ... and over what was added on all ranks. Collective; blocks.
  Scores scores(const cohort::comm::ProcessGroup& group) const;

 private:
  std::array<double, 4> sums() const;  // And the count.

  at::Tensor sums_;  // Of loss, top1 and top5; undefined before the first images.
  int64_t count_ = 0;
};

}  // namespace imagenet
