// SPDX-License-Identifier: Apache-2.0
// Post-local SGD: all ranks reduce gradients at first, then each trains on its own with a mean of
// the models now and then.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

struct PostLocalSgdOptions {
  int64_t start_local_sgd_iter = 100;  ///< Backward passes that all ranks reduce, >= 0.
  /// Ranks that continue to reduce as one group afterwards, such as those of one host. Empty:
  /// gradients are no longer sent at all.
  comm::ProcessGroup subgroup;
};

/// Where a run of post_local_sgd_hook stands. Shared by the hook and the code that saves it.
/// Threads: one.
class PostLocalSgdState {
 public:
  /// Errors: c10::ValueError if start_local_sgd_iter is negative.
  explicit PostLocalSgdState(const PostLocalSgdOptions& options);

  /// Backward passes so far: all there is to save and restore, the same on every rank.
  int64_t iteration() const { return iteration_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }

 private:
  friend CommHook post_local_sgd_hook(std::shared_ptr<PostLocalSgdState> state);
  PostLocalSgdOptions options_;
  int64_t iteration_ = 0;
};

/// Returns the hook that averages gradients over all ranks for `start_local_sgd_iter` passes, then
/// over the subgroup, or not at all.
///
/// Use with PeriodicModelAverager, which then keeps the ranks' models in step; its warmup_steps is
/// start_local_sgd_iter.
/// Collective: as all_reduce_hook, over the group of the phase.
/// Numerics:   as all_reduce_hook; the divisor is the size of the group of the phase.
/// Source:     Lin et al. 2018, arXiv:1808.07217.
CommHook post_local_sgd_hook(std::shared_ptr<PostLocalSgdState> state);

struct PeriodicModelAveragerOptions {
  int64_t period = 1;        ///< Steps from one average to the next, >= 1.
  int64_t warmup_steps = 0;  ///< Steps before the first average, >= 0.
};

/// Replaces parameters by their mean over ranks, every `period` steps.
///
/// Threads: one.
class PeriodicModelAverager {
 public:
  /// Errors: c10::ValueError if an option is out of range.
  PeriodicModelAverager(const comm::ProcessGroup& group,
                        const PeriodicModelAveragerOptions& options);

  /// Counts a step; averages `parameters` in place if step >= warmup_steps and step - warmup_steps
  /// is a multiple of period, counted from 0. Returns whether it did. Call it after each optimizer
  /// step.
  ///
  /// Collective on the steps that average; the same tensors in the same order on every rank.
  /// Blocks.
  /// Numerics: each rank multiplies by 1 / W in the tensor's dtype, then ranks sum.
  /// Memory:   one 25 MiB buffer, or the largest tensor.
  /// Errors:   PeerError.
  bool average_parameters(const std::vector<at::Tensor>& parameters,
                          CallSite site = CallSite::here());

  int64_t step() const {
    return step_;
  }  ///< Steps counted so far: save it, and give it back to set_step.
  void set_step(int64_t step) { step_ = step; }

 private:
  comm::ProcessGroup group_;
  PeriodicModelAveragerOptions options_;
  int64_t step_ = 0;
};

}  // namespace cohort::parallel
