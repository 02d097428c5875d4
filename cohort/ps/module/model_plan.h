// SPDX-License-Identifier: Apache-2.0
// The partition of a libtorch model over servers (plan.h).
#pragma once
#include "cohort/ps/plan.h"

namespace torch::nn {
class Module;
}

namespace cohort::ps {

/// Cuts and places the parameters of `model` that need a gradient, by their names in the model and
/// in its order. Local; nothing of `model` is kept.
/// Errors: as plan(parameters, options).
///
/// In mode kCollective there are no servers: comm::rank_info_from_endpoints(plan.group->endpoints,
/// plan.group->rank) is this trainer's rank info in the process group that takes their part.
Plan plan(const torch::nn::Module& model, const PlanOptions& options);

}  // namespace cohort::ps
