// SPDX-License-Identifier: Apache-2.0
// What a communication hook of DistributedDataParallel is, and the few calls that hooks are written
// with. The hooks that Cohort brings along are in comm_hooks/.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <cstdint>
#include <functional>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// The gradients that are reduced in one call. Made for each call of the hook; the tensors are the
/// reducer's.
struct Bucket {
  int64_t index =
      0;  ///< Position in the order in which buckets are sent, from 0; the same on all ranks.
  bool is_last = false;  ///< No further bucket follows in this backward.
  at::Tensor buffer;     ///< This rank's gradients, flat, not divided; or one sparse gradient.
  std::vector<at::Tensor> gradients;   ///< Views into `buffer`, shaped as their parameters.
  std::vector<at::Tensor> parameters;  ///< In the order of `gradients`.
};

using TensorFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// Replaces the all-reduce of one bucket.
///
/// Returns the future of the reduced gradient: shape and dtype of `bucket.buffer`, already divided
/// (the hook divides, not the reducer). It may write into the buffer. Called during backward, on
/// its thread, for bucket 0, 1, 2 ... in this order on every rank, so collectives started inside
/// the call match between ranks; collectives started by a continuation match only if the hook
/// itself sees to their order.
using CommHook = std::function<TensorFuture(const comm::ProcessGroup&, Bucket)>;

/// Starts the sum of `tensor` over ranks, in place, and returns its future.
///
/// Collective, does not block.
/// Numerics: in the tensor's dtype, nothing is divided. A sparse tensor is summed as a sparse one.
///           The tensor belongs to the call until the future is complete.
/// Errors:   a lost peer's is thrown or ends in the future; the end of loss.backward() makes it a
///           PeerError.
TensorFuture start_all_reduce(const comm::ProcessGroup& group, const at::Tensor& tensor);

/// Returns the future of `next(value)`. `next` runs without gradient mode on the thread that
/// completes `future`, mostly one of the backend's: it must not wait for communication. What it
/// throws ends in the future.
TensorFuture then(const TensorFuture& future, std::function<at::Tensor(const at::Tensor&)> next);

/// Returns a future that holds `tensor` already.
TensorFuture ready(const at::Tensor& tensor);

/// Waits for `future` and returns its tensor.
/// Errors: what the future holds.
at::Tensor wait_tensor(const TensorFuture& future);

}  // namespace cohort::parallel
