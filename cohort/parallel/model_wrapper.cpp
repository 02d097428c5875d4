// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/model_wrapper.h"

#include <c10/util/Exception.h>
#include <cmath>
#include <functional>
#include <torch/types.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/tensor_parallel_layout.h"

namespace cohort::parallel {

NoSync::NoSync(const ModelWrapper& model) : engine_(model.engine().shared_from_this()) {
  if (engine_->num_no_sync_++ == 0) engine_->set_synchronized(false);
}

Unsharded::Unsharded(const ModelWrapper& model, const UnshardedOptions& options, CallSite site)
    : engine_(model.engine().shared_from_this()), options_(options) {
  const CallSiteScope scope(site);
  engine_->unshard();
}

std::vector<at::Tensor> ModelWrapper::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_parameters()) tensors.push_back(tensor);
  return tensors;
}

void ModelWrapper::zero_grad() const {
  engine().drop_waiting_gradients();
  for (const auto& [name, tensor] : named_parameters()) tensor.mutable_grad().reset();
}

double ModelWrapper::gradient_norm(CallSite site) const {
  const CallSiteScope scope(site);
  const comm::ProcessGroup shards = engine().shard_group();
  TORCH_CHECK_VALUE(!shards || engine().num_no_sync_ == 0,
                    "gradient_norm: within no_sync() the shards of a sharded model have no "
                    "gradients yet: expected it after the backward outside of it");
  const auto& layout = ranks_.tensor_parallel;
  std::vector<at::Tensor> parameters;
  std::vector<int> copies;
  for (const auto& [name, tensor] : engine().averaged_parameters()) {
    parameters.push_back(tensor);
    copies.push_back(layout && !layout->is_cut(name) ? layout->group().size() : 1);
  }
  double squares = 0;
  const std::vector<double> own = optim::gradient_norms_squared(parameters);
  for (size_t i = 0; i < own.size(); ++i) squares += own[i] / copies[i];
  at::Tensor sum = at::tensor({squares}, at::kDouble);
  if (shards) shards.all_reduce(sum);
  if (layout) layout->group().all_reduce(sum);
  return std::sqrt(sum.item<double>());
}

void ModelWrapper::check_equal_inputs(const std::vector<at::Tensor>& inputs) const {
  const comm::ProcessGroup& group = ranks_.tensor_parallel->group();
  std::string own;
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) continue;
    const at::Tensor bytes = input.detach().cpu().contiguous();
    own += c10::str(input.dtype(), input.sizes()) +
           std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  const auto all = group.all_gather_object(std::to_string(std::hash<std::string>()(own)));
  for (int rank = 1; rank < group.size(); ++rank) {
    TORCH_CHECK_VALUE(
        all[static_cast<size_t>(rank)] == all[0], "forward: ranks 0 and ", rank,
        " along \"tp\" got different inputs; expected the same, since they compute one "
        "model: give DistributedSampler the coordinate along \"dp\" as its rank");
  }
}

ModelEngine& ModelWrapper::engine() const {
  TORCH_CHECK_VALUE(engine_, "the wrapper of a model is used after it was moved from");
  return *engine_;
}

}  // namespace cohort::parallel
