// SPDX-License-Identifier: Apache-2.0
// The process group of an autograd function, from its forward to its backward.
#pragma once
#include <torch/csrc/autograd/custom_function.h>
#include <utility>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

struct SavedGroup : torch::CustomClassHolder {
  explicit SavedGroup(comm::ProcessGroup g) : group(std::move(g)) {}
  const comm::ProcessGroup group;
};

/// Keeps `group` in `context`.
inline void save_group(torch::autograd::AutogradContext* context, const comm::ProcessGroup& group) {
  context->saved_data["group"] = at::IValue::make_capsule(c10::make_intrusive<SavedGroup>(group));
}

/// Returns the group of save_group.
inline comm::ProcessGroup saved_group(torch::autograd::AutogradContext* context) {
  const auto saved = context->saved_data["group"].toCapsule();
  return static_cast<const SavedGroup&>(*saved).group;
}

}  // namespace cohort::parallel
