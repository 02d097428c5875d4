// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks.
//
// C channels; N elements per channel on all ranks together; W ranks.
#pragma once
#include <ATen/core/Tensor.h>
#include <optional>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// Batch normalisation of [B, C], [B, C, L], [B, C, H, W] or [B, C, D, H, W] over the batches of
/// all ranks of a group.
///
/// In training, mean and variance are of all ranks' batches: outputs, gradients and running
/// statistics are those of one process on their union. Ranks may have batches of different sizes,
/// also none. Names, shapes and meanings of parameters and buffers are those of
/// torch::nn::BatchNorm1d/2d/3d, so checkpoints are interchangeable. Works on CPU and GPU tensors.
///
/// Collective: on more than one rank, forward in training mode (one all-gather of 2 C + 1 numbers)
///             and, if the input needs a gradient, its backward (one all-reduce of 2 C numbers).
///             Both block. Evaluation sends nothing.
/// Devices:    the host waits for a device where momentum is none, for the number of batches, and
///             where this rank's batch has fewer than two values per channel.
/// Numerics:   counts, means and sums of squared differences are combined in float64, in a form
///             that does not cancel. Running variance is unbiased over N. momentum none: cumulative
///             averages. With 16-bit inputs or weights all else is float32, and results are rounded
///             once.
/// Gradients:  the input's gradient is that of the sum of all ranks' losses, as if one process had
///             computed them all. Those of weight and bias are this rank's part of it, for
///             DistributedDataParallel to reduce. DDP divides their sum by W: weigh the local loss
///             sum by W / N_global, as for any other layer, and every gradient is that of the mean
///             over the whole batch.
/// Threads:    as the group: one caller at a time.
/// Errors:     c10::ValueError: another number of channels, or fewer than two values per channel on
///             all ranks together in training (on all of them), a second derivative, or a group
///             that was closed. PeerError: a rank is lost.
/// Source:     Ioffe and Szegedy 2015, arXiv:1502.03167; Chan et al. 1979, eq. 2.1, for the
///             combination.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const comm::ProcessGroup& group);

  at::Tensor forward(const at::Tensor& input);

  /// From now on statistics span `group`. Local; call it on every rank.
  void synchronize_over(const comm::ProcessGroup& group) {
    group_ = group;
    num_ranks_ = group.size();
  }

  void reset() override;  ///< Fresh parameters and statistics.
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight;               ///< [C], undefined unless affine.
  at::Tensor bias;                 ///< [C], undefined unless affine.
  at::Tensor running_mean;         ///< [C], undefined unless track_running_stats.
  at::Tensor running_var;          ///< [C], undefined unless track_running_stats.
  at::Tensor num_batches_tracked;  ///< int64 scalar, undefined unless track_running_stats.

 private:
  double count_batch();

  comm::ProcessGroup group_;
  int num_ranks_ = 1;
};

TORCH_MODULE(SyncBatchNorm);

/// Makes every batch normalisation inside `module`, and `module` itself if it is one, span `group`.
///
/// Converted: torch::nn::BatchNorm1d/2d/3d and SyncBatchNorm, whatever holds them: a typed member,
/// a container, an AnyModule. Each stays the same object with the same tensors, so that optimizers
/// and checkpoints stay valid. From then on it computes what SyncBatchNorm does.
///
/// How:    forward of libtorch's classes is not virtual, but calls aten::batch_norm. A program with
///         this library has a kernel of it that recognises a converted module by its running mean
///         and calls libtorch's own kernel for any other. Without running statistics, the member
///         running_mean (no buffer) gets a tensor for that purpose.
/// Local:  call it on every rank, before or after to() and load(), and before DDP. A second call
///         replaces the group.
/// Limits: a clone() of a converted libtorch module is local; so is a module to whose running_mean
///         another tensor is assigned. A rank with exactly one value per channel is refused by
///         libtorch's forward, before the other ranks' values are known.
/// Errors: c10::ValueError: a libtorch module without running statistics that no shared_ptr holds.
void convert_sync_batchnorm(torch::nn::Module& module, const comm::ProcessGroup& group);

}  // namespace cohort::parallel
