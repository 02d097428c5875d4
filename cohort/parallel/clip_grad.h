// SPDX-License-Identifier: Apache-2.0
// Gradient clipping for every wrapper of a model, by the rules of torch::nn::utils.
#pragma once
#include "cohort/parallel/model_wrapper.h"

namespace cohort::parallel {

struct ClipGradNormOptions {
  /// Throw on every rank if the norm is NaN or infinite. Otherwise, as in torch, a NaN norm makes
  /// all gradients NaN; an infinite norm makes finite gradients 0 and infinite ones NaN.
  bool error_if_nonfinite = false;
};

/// Scales the model's gradients by max_norm / (norm + 1e-6) if that is less than 1. `norm` is the 2
/// norm of the whole gradient, averaged over ranks, of all parts of a tensor-parallel model. Call it
/// between backward and the optimizer's step.
///
///   loss.backward();
///   parallel::clip_grad_norm_(model, 1.0);
///   optimizer.step();
///
/// Returns:    the norm before clipping, the same on every rank.
/// Collective: where the model is sharded or tensor-parallel; blocks. One number is sent for each.
/// Numerics:   as ModelWrapper::gradient_norm. Parameters in `ignored` neither count nor change. A
///             sparse gradient counts as the dense one that it stands for.
/// Errors:     c10::ValueError if max_norm is negative, and as ModelWrapper::gradient_norm; c10::Error
///             if error_if_nonfinite.
double clip_grad_norm_(const ModelWrapper& model, double max_norm,
                       const ClipGradNormOptions& options = {}, CallSite site = CallSite::here());

/// Clamps each element of the model's gradients to [-clip_value, clip_value]. A sparse gradient is
/// coalesced first. Local. Call it between backward and the optimizer's step: a sharded model has no
/// gradients here within no_sync().
/// Errors: c10::ValueError if clip_value is negative.
void clip_grad_value_(const ModelWrapper& model, double clip_value);

}  // namespace cohort::parallel
