// SPDX-License-Identifier: Apache-2.0
// What each collective checks, asks of the backend, and leaves to do afterwards. Not installed.
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "cohort/comm/process_group_impl.h"

namespace cohort::comm {

using Tensors = std::vector<at::Tensor>;

/// A tensor that a backend writes to. `memory` is contiguous: the tensor itself, or a copy that
/// `finish` copies back.
struct Written {
  at::Tensor tensor, memory;

  void finish() const;
  /// A backward that needs the old values shall not take the new ones.
  void bump_version() const;
};

/// Of an operation that fills the tensor.
Written filled(const at::Tensor& tensor);
/// The tensor, or a contiguous copy.
at::Tensor readable(const at::Tensor& tensor);
/// The same memory as plain bytes: backends know few types, and to move data needs none.
at::Tensor as_bytes(const at::Tensor& tensor);

/// Errors: c10::ValueError unless the backend serves `tensor`, and its elements have memory of
/// their own if it is written.
void check_tensor(const at::Tensor& tensor, const char* operation,
                  const c10d::ProcessGroup& backend);
void check_written(const at::Tensor& tensor, const char* operation,
                   const c10d::ProcessGroup& backend);
void check_rank(int rank, int size, const char* operation, const char* role);
/// Of a wait: above 0, and no more than clocks can count.
void check_limit(std::chrono::milliseconds limit, const std::string& operation);

/// The collectives of process_group.h.
/// Errors: c10::ValueError for bad arguments.
Operation all_reduce_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, ReduceOp op,
                        CallSite site);
Operation reduce_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, int root, ReduceOp op,
                    CallSite site);
Operation broadcast_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, int root,
                       CallSite site);
Operation all_gather_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                        const at::Tensor& input, CallSite site);
Operation all_gather_of(c10d::ProcessGroup& backend, const Tensors& outputs,
                        const at::Tensor& tensor, CallSite site);
Operation gather_of(c10d::ProcessGroup& backend, const Tensors& outputs, const at::Tensor& tensor,
                    int root, CallSite site);
Operation scatter_of(c10d::ProcessGroup& backend, const at::Tensor& output, const Tensors& inputs,
                     int root, CallSite site);
Operation reduce_scatter_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                            const at::Tensor& input, ReduceOp op, CallSite site);
/// `compares`: first all ranks compare the splits of tensors of the CPU, which costs an exchange.
Operation all_to_all_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                        const at::Tensor& input, const std::vector<int64_t>& output_splits,
                        const std::vector<int64_t>& input_splits, bool compares, CallSite site);

}  // namespace cohort::comm
