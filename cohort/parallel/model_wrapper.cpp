// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/model_wrapper.h"

#include <c10/util/Exception.h>
#include <cmath>
#include <torch/types.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/tensor_parallel_layout.h"

namespace cohort::parallel {

NoSync::NoSync(const ModelWrapper& model)
    : engine_(model.engine().shared_from_this()), before_(engine_->set_synchronized(false)) {}

Unsharded::Unsharded(const ModelWrapper& model, const UnshardedOptions& options)
    : engine_(model.engine().shared_from_this()), options_(options) {
  engine_->unshard();
}

std::vector<at::Tensor> ModelWrapper::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_parameters()) tensors.push_back(tensor);
  return tensors;
}

double ModelWrapper::gradient_norm() const {
  const auto& layout = ranks_.tensor_parallel;
  double squares = 0;
  for (const auto& [name, tensor] : engine().averaged_parameters()) {
    const int copies = layout && !layout->is_cut(name) ? layout->group().size() : 1;
    squares += optim::gradient_norm_squared({tensor}) / copies;
  }
  at::Tensor sum = at::tensor({squares}, at::kDouble);
  if (const comm::ProcessGroup shards = engine().shard_group()) shards.all_reduce(sum);
  if (layout) layout->group().all_reduce(sum);
  return std::sqrt(sum.item<double>());
}

ModelEngine& ModelWrapper::engine() const {
  TORCH_CHECK_VALUE(engine_, "the wrapper of a model is used after it was moved from");
  return *engine_;
}

}  // namespace cohort::parallel
