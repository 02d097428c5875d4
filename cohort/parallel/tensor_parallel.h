// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism: a matrix is cut between the ranks of a group, each computes with its part,
// and sums over ranks make the results whole. Pieces of autograd for any module.
//
// Two products in a row cost one sum in forward and one in backward, if the first matrix is cut by
// its outputs (rows of W in y = x W^T) and the second by its inputs (columns):
//
//   h = relu(column_parallel_linear(x, first, bias, group));   // this rank's columns of h
//   y = row_parallel_linear(h, second, bias, group);           // whole on every rank
//
// Legend: K ranks, N rows, D width, V vocabulary. "Replicated": the same on every rank of `group`,
// bit by bit. What autograd gives for replicated tensors is replicated, too: no rank needs to send
// the gradients of biases and norms. Wrappers are told what is cut (tensor_parallel_plan.h); then
// clip_grad_norm_ and checkpoint::save are those of the whole model.
//
// Collective: all ranks of `group` call the functions below, and run their backwards, in the same
//             order. Those that send (see "Cost") block.
// Numerics:   sums run in the tensor's own type, over shm half types in float32; all ranks get the
//             same bits.
// Errors:     PeerError; c10::ValueError for shapes that do not fit, before anything is sent, but
//             libtorch's c10::Error from the linears. Ids and labels are not checked: an id out of
//             range gives a row of zeros.
// Source:     Shoeybi et al. 2019, arXiv:1909.08053, section 3.
#pragma once
#include <ATen/core/Tensor.h>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// x (replicated) as it is; its gradient becomes the sum over ranks. What is before ranks compute
/// different things of x. Paper: f.
/// Cost: backward, an all_reduce of x.
at::Tensor copy_to_group(const at::Tensor& x, const comm::ProcessGroup& group,
                         CallSite site = CallSite::here());

/// The sum of the ranks' x, replicated; the gradient passes as it is. Paper: g.
/// Cost: forward, an all_reduce of x.
at::Tensor reduce_from_group(const at::Tensor& x, const comm::ProcessGroup& group,
                             CallSite site = CallSite::here());

/// The same in place, of a result that nobody else reads, not even its own backward: a product's.
at::Tensor reduce_from_group_(const at::Tensor& x, const comm::ProcessGroup& group,
                              CallSite site = CallSite::here());

/// The ranks' columns (last dimension) side by side, replicated: rank r's are cut_of(num_columns,
/// r, K) of base/tensor_part.h. A rank's gradient is that of its own columns.
at::Tensor gather_from_group(const at::Tensor& x, int64_t num_columns,
                             const comm::ProcessGroup& group, CallSite site = CallSite::here());

/// This rank's columns of x W^T + b, for rows of W and b. `bias` may be undefined.
at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& bias, const comm::ProcessGroup& group,
                                  CallSite site = CallSite::here());

/// x W^T + b, replicated, for columns of x and of W; b (replicated) is added after the sum and may
/// be undefined.
at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const comm::ProcessGroup& group,
                               CallSite site = CallSite::here());

/// Rows of a table of which rank r has cut_of(vocabulary, r, K): `table` [V/K, D]. ids: int64 of
/// any shape, in [0, vocabulary), the same on every rank. Returns [ids..., D], replicated,
/// bit-equal to the whole table's rows.
/// Cost: forward, an all_reduce of the result.
at::Tensor vocabulary_parallel_embedding(const at::Tensor& table, const at::Tensor& ids,
                                         int64_t vocabulary, const comm::ProcessGroup& group,
                                         CallSite site = CallSite::here());

/// Sums over rows, scalars on hidden's device, replicated.
struct VocabularyLoss {
  at::Tensor loss;  ///< With label smoothing; differentiable. float32 (float64 for float64 hidden).
  at::Tensor nll;   ///< Without; float64, no gradient.
};

/// Label-smoothed cross-entropy of hidden W^T, where rank r has the rows cut_of(vocabulary, r, K)
/// of W: `weight` [V/K, D], cast to hidden's type; `hidden` [N, D] and int64 `labels` [N] in [0,
/// vocabulary) are replicated.
///
/// No rank ever sees another's scores: ranks exchange four numbers a row. With gradients enabled
/// the forward computes them too, chunk by chunk of 1,024 rows, and backward only scales them: it
/// can run once.
/// Cost:     forward, an all_gather of [4, 1024] for each chunk and an all_reduce of hidden.
/// Numerics: scores in hidden's type; losses and the weight's gradient in float32 or wider.
/// Source:   the loss as Szegedy et al. 2016, arXiv:1512.00567, section 7, with the uniform share
///           over all V; sums of exponentials of several parts as Milakov and Gimelshein 2018,
///           arXiv:1805.02867, section 3.1.
VocabularyLoss vocabulary_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                                 const at::Tensor& labels, double smoothing,
                                                 int64_t vocabulary,
                                                 const comm::ProcessGroup& group,
                                                 CallSite site = CallSite::here());

}  // namespace cohort::parallel
