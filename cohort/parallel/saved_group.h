// The process group of an autograd function, from its forward to its backward.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

struct SavedGroup : torch::CustomClassHolder {
  explicit SavedGroup(comm::ProcessGroup& group) : reference(group) {}
  const comm::GroupReference reference;
};

/// Notes `group` in `context`, which may outlive it.
inline void save_group(torch::autograd::AutogradContext* context, comm::ProcessGroup& group) {
  context->saved_data["group"] = at::IValue::make_capsule(c10::make_intrusive<SavedGroup>(group));
}

/// Returns the group of save_group. Errors: c10::ValueError that names `user` if it is gone.
inline comm::ProcessGroup& saved_group(torch::autograd::AutogradContext* context,
                                       const char* user) {
  const auto saved = context->saved_data["group"].toCapsule();
  return static_cast<const SavedGroup&>(*saved).reference.get(user);
}

}  // namespace cohort::parallel
