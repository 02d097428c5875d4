// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/grad_scaler.h"

#include <map>
#include <set>
#include <torch/types.h>

namespace cohort::parallel {

GradScaler::GradScaler(const comm::ProcessGroup& group, const GradScalerOptions& options)
    : group_(group), options_(options) {
  const auto check = [](bool good, const char* name, const char* expected, double value) {
    TORCH_CHECK_VALUE(good, "GradScaler: ", name, ": expected ", expected, ", got ", value);
  };
  check(options.init_scale > 0, "init_scale", "more than 0", options.init_scale);
  check(options.growth_factor > 1, "growth_factor", "more than 1", options.growth_factor);
  check(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
        "more than 0, less than 1", options.backoff_factor);
  check(options.growth_interval > 0, "growth_interval", "more than 0",
        static_cast<double>(options.growth_interval));
  scale_ = at::full({}, options.init_scale, at::kFloat);
  growth_tracker_ = at::zeros({}, at::kInt);
}

double GradScaler::scale() const {
  return scale_.item<double>();
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return loss * scale();
}

bool GradScaler::unscale(const std::vector<at::Tensor>& parameters, CallSite site) {
  TORCH_CHECK_VALUE(!found_inf_.defined(), "GradScaler: unscale was called since the last update");
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> kinds;
  std::set<const at::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    TORCH_CHECK_VALUE(gradient.scalar_type() != at::kHalf,
                      "GradScaler: a gradient in float16: expected parameters in float32");
    TORCH_CHECK_VALUE(!gradient.is_sparse(), "GradScaler: a sparse gradient: expected dense ones");
    kinds[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
  }
  at::Tensor found = at::zeros({}, at::kFloat);
  const double inverse = 1 / scale();
  std::map<std::string, at::Tensor> by_device;
  for (const auto& [kind, gradients] : kinds) {
    const auto options = found.options().device(gradients.front().device());
    const auto [place, fresh] = by_device.try_emplace(kind.first);
    if (fresh) place->second = at::zeros({}, options);
    // A number, which a device takes without a copy.
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, place->second,
                                                   at::full({}, inverse, options));
  }
  for (const auto& [device, here] : by_device) found.add_(here.to(at::kCPU));
  group_.all_reduce(found, comm::ReduceOp::kMax, site);
  found_inf_ = found;
  return found.item<float>() == 0;
}

void GradScaler::update() {
  TORCH_CHECK_VALUE(found_inf_.defined(), "GradScaler: update expects unscale before it");
  const at::NoGradGuard no_grad;
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf_, options_.growth_factor,
                         options_.backoff_factor, options_.growth_interval);
  found_inf_.reset();
}

std::vector<std::pair<std::string, at::Tensor>> GradScaler::state() const {
  return {{"scale", scale_}, {"growth_tracker", growth_tracker_}};
}

}  // namespace cohort::parallel
