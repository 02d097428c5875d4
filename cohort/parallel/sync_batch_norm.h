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

/// Batch normalisation of [B, C], [B, C, L], [B, C, H, W] or [B, C, D, H, W] whose statistics may
/// span ranks.
///
/// Without a group it is torch::nn::BatchNorm1d/2d/3d in one class, local to the rank; with a group
/// (given to SyncBatchNorm, or later to synchronize_over) its training forward takes mean and
/// variance over the batches of all ranks: outputs, gradients and running statistics are those of
/// one process on their union. Ranks may have batches of different sizes, also none. Names, shapes
/// and meanings of parameters and buffers are BatchNorm's, so checkpoints are interchangeable.
/// Works on CPU and GPU tensors.
///
/// Collective: with a group of more than one rank, forward in training mode (one all-gather of 2 C
/// + 1 numbers) and,
///           if the input needs a gradient, its backward (one all-reduce of 2 C numbers). Both
///           block. Evaluation sends nothing.
/// Numerics: counts, means and sums of squared differences are combined in float64, in a form that
/// does not
///           cancel. Running variance is unbiased over N. momentum none: cumulative averages. With
///           16-bit inputs or weights all else is float32, and results are rounded once.
/// Gradients: the input's gradient is that of the sum of all ranks' losses, as if one process had
/// computed them
///           all. Those of weight and bias are this rank's part of it, for DistributedDataParallel
///           to reduce. DDP divides their sum by W: weigh the local loss sum by W / N_global, as
///           for any other layer, and every gradient is that of the mean over the whole batch.
/// Threads:  as the group: one caller at a time.
/// Errors:   c10::ValueError: another number of channels, or fewer than two values per channel on
/// all ranks
///           together in training (on all of them), a second derivative, or a group that was
///           closed. PeerError: a rank is lost.
/// Source:   Ioffe and Szegedy 2015, arXiv:1502.03167; Chan et al. 1979, eq. 2.1, for the
/// combination.
class BatchNormImpl : public torch::nn::Cloneable<BatchNormImpl> {
 public:
  /// The tensors of another batch normalisation, to be shared. Undefined where its options say so.
  struct Tensors {
    at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  };

  explicit BatchNormImpl(const torch::nn::BatchNormOptions& options,
                         const comm::ProcessGroup& group = {});
  /// Shares `tensors`: an optimizer that holds them goes on working.
  BatchNormImpl(const torch::nn::BatchNormOptions& options, const Tensors& tensors,
                const comm::ProcessGroup& group);

  at::Tensor forward(const at::Tensor& input);

  /// From now on statistics span `group`. Local; call it on every
  /// rank.
  void synchronize_over(const comm::ProcessGroup& group) {
    group_ = group;
    num_ranks_ = group.size();
  }
  bool is_synchronized() const { return static_cast<bool>(group_); }

  void reset() override;  ///< Fresh parameters and statistics.
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight;               ///< [C], undefined unless affine.
  at::Tensor bias;                 ///< [C], undefined unless affine.
  at::Tensor running_mean;         ///< [C], undefined unless track_running_stats.
  at::Tensor running_var;          ///< [C], undefined unless track_running_stats.
  at::Tensor num_batches_tracked;  ///< int64 scalar, undefined unless track_running_stats.

 private:
  void register_tensors(const Tensors& tensors);
  double count_batch();

  comm::ProcessGroup group_;  // empty: this rank alone
  int num_ranks_ = 1;
};

/// Holds a BatchNormImpl. Models written with it are converted whole by convert_sync_batchnorm.
TORCH_MODULE(BatchNorm);

/// A BatchNorm that is synchronised from the start.
class SyncBatchNorm : public torch::nn::ModuleHolder<BatchNormImpl> {
 public:
  explicit SyncBatchNorm(std::nullptr_t) : ModuleHolder(nullptr) {}
  SyncBatchNorm(const torch::nn::BatchNormOptions& options, const comm::ProcessGroup& group)
      : ModuleHolder(std::make_shared<BatchNormImpl>(options, group)) {}
};

/// Makes every batch normalisation inside `module` span `group`. Local; call it on every rank,
/// before DDP.
///
/// Converted: every cohort::parallel::BatchNorm, in place, and every torch::nn::BatchNorm1d/2d/3d
/// that is an element of a torch::nn::Sequential, by an element that shares its tensors under the
/// same name, so optimizers and checkpoints stay valid. libtorch's forward is not virtual, so a
/// BatchNorm that is a typed member of a module, or the module itself, cannot be replaced. Errors:
/// c10::ValueError that names all such BatchNorms; then nothing was changed.
void convert_sync_batchnorm(torch::nn::Module& module, const comm::ProcessGroup& group);

}  // namespace cohort::parallel
