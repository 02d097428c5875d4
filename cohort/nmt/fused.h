// Differentiable operations of the Transformer for which ATen has no fused form; values in
// kernels/. Legend: B sentences, H heads, Q queries, K keys, N rows, D model width, V vocabulary.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

namespace cohort::nmt {

/// The dropout of one model on one rank: which elements fall is a function of (seed, number of the
/// call).
///
/// Owner: the model. Threads: one. `call` is the whole state: put back, the same elements fall
/// again.
struct DropoutStream {
  uint64_t seed = 0;
  uint64_t call = 0;
};

/// Returns x with each element zeroed with probability `p` and the others divided by 1 - p.
/// p is rounded to 1/65536. Types: float32, float64, bfloat16. p = 0 returns x itself.
at::Tensor dropout(const at::Tensor& x, double p, DropoutStream& stream);

/// Returns dropout(relu(x)) in one pass.
at::Tensor relu_dropout(const at::Tensor& x, double p, DropoutStream& stream);

/// Returns dropout(softmax(scale * scores)) over the keys that a query may see: those before its
/// sequence's length and, if `causal`, not after the query. Others get 0.
///
/// Shapes: scores_BHQK, contiguous; key_lengths_B int64 in [1, K].
at::Tensor masked_softmax(const at::Tensor& scores_BHQK, const at::Tensor& key_lengths_B,
                          bool causal, double scale, double p, DropoutStream& stream);

/// Sums of a batch's losses, both scalars: `loss` with label smoothing (differentiable), `nll`
/// without.
struct LossSums {
  at::Tensor loss;  ///< float32 (float64 for a float64 model).
  at::Tensor nll;   ///< float64, no gradient.
};

/// Projects hidden states to the vocabulary and sums label-smoothed cross-entropy over the rows.
///
/// Rows are taken in chunks, so that [N, V] never exists in float32; with gradients enabled the
/// forward computes them too, chunk by chunk, and backward only scales them. Shapes:   hidden_ND in
/// the compute type, weight_VD (any float type; cast to hidden's), labels_N int64. Numerics: logits
/// in the compute type, losses and the weight's gradient summed in float32 or wider. Source:
/// Szegedy et al. 2016, arXiv:1512.00567, section 7, with the uniform share over all V.
LossSums smoothed_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                                const at::Tensor& labels_N, double smoothing);

}  // namespace cohort::nmt
