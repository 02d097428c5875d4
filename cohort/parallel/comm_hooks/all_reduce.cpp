// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hooks/all_reduce.h"

namespace cohort::parallel {

CommHook all_reduce_hook() {
  return [](const comm::ProcessGroup& group, const Bucket& bucket) {
    at::Tensor gradient = bucket.buffer;
    // As the reducer divides, so that the bits are the same.
    gradient.mul_(1.0 / group.size());
    return start_all_reduce(group, gradient);
  };
}

CommHook noop_hook() {
  return [](const comm::ProcessGroup&, const Bucket& bucket) { return ready(bucket.buffer); };
}

}  // namespace cohort::parallel
