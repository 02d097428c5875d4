// What a Transformer asks of the others, where several compute one model together and each has a
// part of its parameters. Nothing is said here of who they are and how they talk.
//
// Attention is cut by heads, the feed-forward blocks by their inner columns, tables by vocabulary;
// the rest (norms, biases of outputs, the residual stream) everybody has, and computes the same.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

#include "cohort/base/tensor_part.h"
#include "cohort/nmt/fused.h"

namespace cohort::nmt {

/// One of the parts. This class is that of a model which is whole; others override what talks.
///
/// All parts make the same calls in the same order, in backward too. "The same" is said of tensors
/// that all parts have, bit by bit. Threads: one.
class Division {
 public:
  /// The whole.
  Division() = default;
  /// Part `index` of `count`.
  Division(int64_t index, int64_t count) : index_(index), count_(count) {}
  virtual ~Division() = default;
  Division(const Division&) = delete;
  Division& operator=(const Division&) = delete;

  int64_t count() const { return count_; }
  /// What this part has of `size` heads, columns or rows.
  ElementRange cut(int64_t size) const { return cut_of(size, index_, count_); }
  /// Of a tensor whose every `size` elements are this part's of count() times as many.
  DropoutPart dropout_part(int64_t size) const {
    return {.size = size, .whole = size * count_, .first = size * index_};
  }

  /// x, the same, before each part computes its own of it: gradients of x are summed over parts.
  virtual at::Tensor enter(const at::Tensor& x) const { return x; }
  /// The sum over parts, the same; the gradient passes as it is.
  virtual at::Tensor leave(const at::Tensor& x) const { return x; }
  /// The parts' columns (last dimension) side by side: all of `num_columns`. In inference.
  virtual at::Tensor join(const at::Tensor& columns, int64_t num_columns) const;
  /// Rows `ids` of a table of `vocabulary` rows, from the part's rows of it; the same.
  virtual at::Tensor embed(const at::Tensor& table_VD, const at::Tensor& ids,
                           int64_t vocabulary) const;
  /// As smoothed_cross_entropy over `vocabulary` words, from the part's rows of the weight; the
  /// same.
  virtual LossSums cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                                 const at::Tensor& labels_N, double smoothing,
                                 int64_t vocabulary) const;

 private:
  int64_t index_ = 0;
  int64_t count_ = 1;
};

}  // namespace cohort::nmt
