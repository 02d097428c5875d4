// SPDX-License-Identifier: Apache-2.0
// What a Transformer needs from the other ranks where several compute one model (tensor
// parallelism) and each holds a shard of its parameters. Knows nothing of ranks and of
// communication.
//
// Attention is cut by heads, the feed-forward blocks by their inner columns, tables by vocabulary;
// the rest (norms, biases of outputs, the residual stream) is replicated.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

#include "cohort/base/tensor_part.h"
#include "cohort/nmt/fused.h"

namespace cohort::nmt {

/// One shard's view of the group. This class is that of an unsharded model; subclasses override
/// what communicates.
///
/// All shards make the same calls in the same order, in backward too. "Replicated": the same on
/// every shard, bit by bit.
/// Threads: one.
class TensorParallelContext {
 public:
  /// Of an unsharded model.
  TensorParallelContext() = default;
  /// Shard `index` of `count`.
  TensorParallelContext(int64_t index, int64_t count) : index_(index), count_(count) {}
  virtual ~TensorParallelContext() = default;
  TensorParallelContext(const TensorParallelContext&) = delete;
  TensorParallelContext& operator=(const TensorParallelContext&) = delete;

  int64_t count() const { return count_; }
  /// What this shard has of `size` heads, columns or rows.
  ElementRange shard_range(int64_t size) const { return cut_of(size, index_, count_); }
  /// Of a tensor of which every `size` elements are this shard's of count() times as many.
  DropoutPart dropout_part(int64_t size) const {
    return {.size = size, .whole = size * count_, .first = size * index_};
  }

  /// x, replicated, before each shard computes something of its own: its gradients are summed over
  /// shards.
  virtual at::Tensor copy_to_region(const at::Tensor& x) const { return x; }
  /// The sum over shards, replicated; the gradient passes as it is. May be made in x's memory: x is
  /// a result that nobody else reads.
  virtual at::Tensor reduce_from_region(const at::Tensor& x) const { return x; }
  /// The shards' columns (last dimension) side by side: all of `num_columns`. In inference.
  virtual at::Tensor gather_from_region(const at::Tensor& columns, int64_t num_columns) const;
  /// Rows `ids` of a table of `vocabulary` rows, of which each shard has its own; replicated.
  virtual at::Tensor embed(const at::Tensor& table_VD, const at::Tensor& ids,
                           int64_t vocabulary) const;
  /// As smoothed_cross_entropy over `vocabulary` words, of which each shard has its rows of the
  /// weight; replicated.
  virtual LossSums cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                                 const at::Tensor& labels_N, double smoothing,
                                 int64_t vocabulary) const;

 private:
  int64_t index_ = 0;
  int64_t count_ = 1;
};

}  // namespace cohort::nmt
