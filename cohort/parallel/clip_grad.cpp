// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/clip_grad.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <cmath>

namespace cohort::parallel {

double clip_grad_norm_(const ModelWrapper& model, double max_norm,
                       const ClipGradNormOptions& options, CallSite site) {
  TORCH_CHECK_VALUE(max_norm >= 0, "clip_grad_norm_: max_norm: expected 0 or more, got ", max_norm);
  const double norm = model.gradient_norm(site);
  TORCH_CHECK(!options.error_if_nonfinite || std::isfinite(norm),
              "clip_grad_norm_: the norm of the gradient is ", norm,
              ": expected a finite one, as error_if_nonfinite is set");
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : model.engine().averaged_parameters())
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  return norm;
}

void clip_grad_value_(const ModelWrapper& model, double clip_value) {
  TORCH_CHECK_VALUE(clip_value >= 0, "clip_grad_value_: expected 0 or more, got ", clip_value);
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : model.engine().averaged_parameters()) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.coalesce();  // A row may be there twice.
    (gradient.is_sparse() ? gradient.values() : gradient).clamp_(-clip_value, clip_value);
  }
}

}  // namespace cohort::parallel
