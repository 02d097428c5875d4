// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hooks/compress.h"

#include <utility>

namespace cohort::parallel {
namespace {

void check_dense(const Bucket& bucket) {
  TORCH_CHECK_VALUE(!bucket.buffer.is_sparse(),
                    "compression hook: expected dense gradients, bucket ", bucket.index,
                    " is sparse");
}

TensorFuture widen_into(const at::Tensor& buffer, const TensorFuture& low) {
  return then(low, [buffer](const at::Tensor& value) {
    at::Tensor result = buffer;
    return result.copy_(value);
  });
}

CommHook compress_wrapper(at::ScalarType type, CommHook inner) {
  return [type, inner = std::move(inner)](const comm::ProcessGroup& group, const Bucket& bucket) {
    check_dense(bucket);
    Bucket low = bucket;
    low.buffer = bucket.buffer.to(type);
    const int64_t start = bucket.buffer.storage_offset();
    for (at::Tensor& gradient : low.gradients) {
      gradient = low.buffer.as_strided(gradient.sizes(), gradient.strides(),
                                       gradient.storage_offset() - start);
    }
    return widen_into(bucket.buffer, inner(group, std::move(low)));
  };
}

}  // namespace

CommHook compress_hook(at::ScalarType type, std::function<int()> divisor) {
  return
      [type, divisor = std::move(divisor)](const comm::ProcessGroup& group, const Bucket& bucket) {
        check_dense(bucket);
        at::Tensor gradient = bucket.buffer;
        // Divided before it is rounded: the sum then stays in float16's range.
        gradient.mul_(1.0 / (divisor ? divisor() : group.size()));
        return widen_into(gradient, start_all_reduce(group, gradient.to(type)));
      };
}

CommHook fp16_compress_hook() {
  return compress_hook(at::kHalf);
}
CommHook bf16_compress_hook() {
  return compress_hook(at::kBFloat16);
}
CommHook fp16_compress_wrapper(CommHook inner) {
  return compress_wrapper(at::kHalf, std::move(inner));
}
CommHook bf16_compress_wrapper(CommHook inner) {
  return compress_wrapper(at::kBFloat16, std::move(inner));
}

}  // namespace cohort::parallel
