// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/model_plan.h"

#include <torch/nn/module.h>
#include <utility>

namespace cohort::ps {

Plan plan(const torch::nn::Module& model, const PlanOptions& options) {
  std::vector<ParameterShape> shapes;
  for (const auto& parameter : model.named_parameters()) {
    if (!parameter.value().requires_grad()) continue;
    shapes.push_back({parameter.key(), parameter.value().sizes().vec()});
  }
  return plan(std::move(shapes), options);
}

}  // namespace cohort::ps
