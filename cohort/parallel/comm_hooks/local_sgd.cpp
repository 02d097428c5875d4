// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hooks/local_sgd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <utility>

#include "cohort/parallel/comm_hooks/all_reduce.h"

namespace cohort::parallel {
namespace {

constexpr size_t kMessageBytes = 25 << 20;

void average(const comm::ProcessGroup& group, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  at::Tensor message = at::cat(flat);
  message.mul_(1.0 / group.size());
  group.all_reduce(message);
  int64_t offset = 0;
  for (at::Tensor tensor : tensors) {
    tensor.copy_(message.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace

PostLocalSgdState::PostLocalSgdState(const PostLocalSgdOptions& options) : options_(options) {
  TORCH_CHECK_VALUE(options.start_local_sgd_iter >= 0,
                    "start_local_sgd_iter: expected 0 or more, got ", options.start_local_sgd_iter);
}

CommHook post_local_sgd_hook(std::shared_ptr<PostLocalSgdState> state) {
  return [state = std::move(state), everyone = all_reduce_hook()](const comm::ProcessGroup& group,
                                                                  const Bucket& bucket) {
    const bool reduces_globally = state->iteration_ < state->options_.start_local_sgd_iter;
    if (bucket.is_last) ++state->iteration_;
    if (reduces_globally) return everyone(group, bucket);
    const comm::ProcessGroup& subgroup = state->options_.subgroup;
    return subgroup ? everyone(subgroup, bucket) : ready(bucket.buffer);
  };
}

PeriodicModelAverager::PeriodicModelAverager(const comm::ProcessGroup& group,
                                             const PeriodicModelAveragerOptions& options)
    : group_(group), options_(options) {
  TORCH_CHECK_VALUE(options.period >= 1, "period: expected 1 or more, got ", options.period);
  TORCH_CHECK_VALUE(options.warmup_steps >= 0, "warmup_steps: expected 0 or more, got ",
                    options.warmup_steps);
}

bool PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters,
                                               CallSite site) {
  const CallSiteScope scope(site);
  const int64_t since_warmup = step_++ - options_.warmup_steps;
  if (since_warmup < 0 || since_warmup % options_.period != 0) return false;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> part;
  size_t bytes = 0;
  for (const at::Tensor& tensor : parameters) {
    const bool fits =
        part.empty() || (tensor.dtype() == part[0].dtype() && tensor.device() == part[0].device() &&
                         bytes + tensor.nbytes() <= kMessageBytes);
    if (!fits) {
      average(group_, std::exchange(part, {}));
      bytes = 0;
    }
    part.push_back(tensor);
    bytes += tensor.nbytes();
  }
  if (!part.empty()) average(group_, part);
  return true;
}

}  // namespace cohort::parallel
