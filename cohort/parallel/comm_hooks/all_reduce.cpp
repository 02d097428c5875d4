// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hooks/all_reduce.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "cohort/comm/shared_tensor.h"

namespace cohort::parallel {
namespace {

TensorFuture start_average(const comm::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  const TensorFuture future = group.c10d_group().allreduce(tensors, options)->getFuture();
  return then(future, [tensor](const at::Tensor&) { return tensor; });
}

}  // namespace

CommHook all_reduce_hook(std::function<int()> divisor) {
  return [divisor = std::move(divisor)](const comm::ProcessGroup& group, const Bucket& bucket) {
    at::Tensor gradient = bucket.buffer;
    const int parts = divisor ? divisor() : group.size();
    const bool averages = gradient.is_cpu() && comm::averages_while_summing(group);
    // A half type's sum might leave its range before it is divided.
    if (averages && parts == group.size() && !gradient.is_sparse() && gradient.element_size() >= 4)
      return start_average(group, gradient);
    // As c10d's reducer divides, so that the bits are the same.
    gradient.mul_(1.0 / parts);
    return start_all_reduce(group, gradient);
  };
}

CommHook noop_hook() {
  return [](const comm::ProcessGroup&, const Bucket& bucket) { return ready(bucket.buffer); };
}

}  // namespace cohort::parallel
