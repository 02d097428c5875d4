// SPDX-License-Identifier: Apache-2.0
// An operation of the backends shm and hierarchical, from its c10d options to the queue.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cohort/comm/backends/shm/rank_signals.h"

namespace cohort::comm {

/// What a backend queues.
struct BackendCall {
  c10d::OpType type;
  SharedCall shared;  ///< Its number: when it is queued.
  std::chrono::milliseconds timeout;
  bool in_background = true;
  std::vector<at::Tensor> results;
  std::function<void()> run;
};

/// Returns the call of c10d's `options`. `like`: what all ranks' tensors are like, in dtype and
/// number of elements; undefined: nothing. `timeout`: if the options have none.
template <typename CallOptions>
BackendCall backend_call(c10d::OpType type, const CallOptions& options,
                         const std::vector<at::Tensor>& results, const at::Tensor& like,
                         std::chrono::milliseconds timeout) {
  BackendCall call{.type = type,
                   .shared = {.operation = static_cast<int32_t>(type)},
                   .timeout = options.timeout.count() > 0 ? options.timeout : timeout,
                   .in_background = options.asyncOp,
                   .results = results,
                   .run = {}};
  if (like.defined()) {
    call.shared.dtype = static_cast<int32_t>(like.scalar_type());
    call.shared.numel = like.numel();
  }
  if constexpr (requires { options.reduceOp; })
    call.shared.reduce_op = static_cast<int32_t>(options.reduceOp.op_);
  if constexpr (requires { options.rootRank; })
    call.shared.root = static_cast<int32_t>(options.rootRank);
  return call;
}

}  // namespace cohort::comm
