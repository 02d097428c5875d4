// SPDX-License-Identifier: Apache-2.0
// Figures over all ranks: ranks send sums, and one division comes last, so that ranks with different
// numbers of examples count by their examples, and the result is that of one process on all.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::train {

/// Returns the sums of `values` over the ranks of `group`, on every rank.
///
/// Collective; blocks. Every rank gives as many values.
/// Numerics: float64.
/// Errors:   PeerError if a rank is lost.
std::vector<double> reduce_sums(const comm::ProcessGroup& group, std::span<const double> values,
                                CallSite site = CallSite::here());

/// A mean weighted by numbers of examples.
class MeanMetric {
 public:
  /// Adds `count` >= 0 examples whose mean is `mean`; with 0 nothing is added, NaN or not.
  void add(double mean, int64_t count);
  /// Adds each element of `values`, of any floating or integral type.
  void add(const at::Tensor& values);

  double sum() const { return sum_; }
  int64_t count() const { return count_; }
  /// Returns this rank's mean; NaN without examples.
  double local_mean() const;
  /// Returns the mean over the examples of all ranks, on every rank; NaN without examples.
  /// Collective; blocks.
  /// Errors: PeerError if a rank is lost.
  double mean(const comm::ProcessGroup& group, CallSite site = CallSite::here()) const;

 private:
  double sum_ = 0;
  int64_t count_ = 0;
};

/// Counts the examples that have their label among the `k` highest scores. Returns an int64 scalar
/// on the scores' device, for which the host does not wait.
///
/// Shapes: B examples, C classes; `scores_BC` floating, `labels_B` int64 in [0, C); k in [1, C]
///         (more counts as C). Equal scores rank by class, the lower first, so that the result does
///         not depend on the machine. An example whose label's score is NaN does not count.
/// Errors: c10::ValueError for other shapes or k < 1.
at::Tensor top_k_hits(const at::Tensor& scores_BC, const at::Tensor& labels_B, int64_t k);
/// The same as a number.
int64_t count_top_k(const at::Tensor& scores_BC, const at::Tensor& labels_B, int64_t k);

}  // namespace cohort::train
