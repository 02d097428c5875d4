// SPDX-License-Identifier: Apache-2.0
// Loss scaling for float16, in which small gradients vanish and large ones overflow.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

struct GradScalerOptions {
  double init_scale = 65536;       ///< The loss' first factor, > 0.
  double growth_factor = 2;        ///< Of the scale, after growth_interval steps; > 1.
  double backoff_factor = 0.5;     ///< Of the scale, after a step that overflowed; in (0, 1).
  int64_t growth_interval = 2000;  ///< Steps in a row without an overflow, > 0.
};

/// Multiplies losses by a factor that adapts to the gradients' range, with the rules of PyTorch's
/// torch.amp.GradScaler.
///
///   scaler.scale(loss).backward();
///   if (scaler.unscale(parameters)) optimizer.step();  // Clip between the two.
///   scaler.update();
///
/// A step whose gradients are not all finite on all ranks is left out by every rank, and the scale
/// shrinks; after growth_interval good ones it grows. Works with whole gradients
/// (DistributedDataParallel, optim or torch::optim parameters) and with shards of them
/// (FullyShardedDataParallel), which a rank alone may see overflow.
///
/// `group`: all ranks, or those that shard the model (ranks along "dp_replicate" have the same
/// gradients).
/// Collective: unscale.
/// Threads:    one.
/// Numerics:   gradients are multiplied by the float32 reciprocal of the scale, in their type.
/// Source:     Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
class GradScaler {
 public:
  /// Errors: c10::ValueError for options out of range.
  explicit GradScaler(const comm::ProcessGroup& group, const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;  ///< loss times the scale. Local.
  double scale() const;

  /// Divides the gradients of `parameters` by the scale, in place, once per step. Returns whether
  /// they are finite on all ranks: the caller steps then, and only then.
  ///
  /// Collective; blocks, until gradients on a device are there: one element is read back from it,
  /// and sent. Undefined gradients count as finite; a rank may have
  /// none at all.
  /// Errors: c10::ValueError if called twice before `update`, for a sparse gradient, or for float16
  ///         gradients, whose small ones would vanish here: parameters are expected in float32. It
  ///         is thrown before anything is sent: ranks without such a gradient wait.
  bool unscale(const std::vector<at::Tensor>& parameters, CallSite site = CallSite::here());

  /// Moves the scale by what `unscale` has found. Local.
  /// Errors: c10::ValueError without an `unscale` before.
  void update();

  /// The state, to be saved or filled: "scale" (float32), "growth_tracker" (int32), both scalars,
  /// the same on all ranks.
  std::vector<std::pair<std::string, at::Tensor>> state() const;

 private:
  comm::ProcessGroup group_;
  GradScalerOptions options_;
  at::Tensor scale_;
  at::Tensor growth_tracker_;  // good steps in a row
  at::Tensor found_inf_;       // > 0: in the present step; undefined before its `unscale`
};

}  // namespace cohort::parallel
