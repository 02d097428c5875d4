// SPDX-License-Identifier: Apache-2.0
// Operations of the Transformer for which ATen has no fused form: differentiable ones, on every
// device (kernels/kernels.h), then those of inference alone: `attend` on the CPU, LogProbs on every
// device. Tensors of another device than these, or of two, are a c10::ValueError. Numbers that index
// (lengths, labels) are checked on the CPU alone: elsewhere that would wait for the device. Second
// derivatives (create_graph) are refused by a c10::NotImplementedError. Legend: B
// sentences, H heads, Q queries, K keys, N rows (packed ones, see SentenceRows, of keys: M), D model
// width, V vocabulary.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cohort/nmt/int8_matrix.h"

namespace cohort::nmt {

/// The finalizer of SplitMix64: a one-to-one hash of 64 bits.
uint64_t splitmix64_finalizer(uint64_t bits);

/// The dropout of one model on one rank: which elements fall is a function of (seed, number of the
/// call).
///
/// Owner:   the model.
/// Threads: one. `call` is the whole state: put back, the same elements fall again.
struct DropoutStream {
  uint64_t seed = 0;
  uint64_t call = 0;
};

/// Which elements of a whole tensor are here, where a model is computed in parts: of every `whole`
/// neighbours the `size` from `first` on. The same ones of them fall as in the whole. As it is,
/// all.
struct DropoutPart {
  int64_t size = 1;
  int64_t whole = 1;
  int64_t first = 0;
  /// int64: of which `whole` neighbours, counted from 0, each `size` elements are: so packed rows drop what
  /// padded ones do (SentenceRows::elements_N). Undefined: of all of them, in order. Not on CUDA.
  at::Tensor rows_N{};

  bool is_all() const { return size == whole && !rows_N.defined(); }
};

/// Returns x W^T + b, computed in `type`.
///
/// Shapes:   x [..., K], weight_MK, bias_M or none. Result [..., M] of `type`.
/// Numerics: gradients are of their tensors' types. Those of a weight and a bias wider than `type`
///           are sums in float32; the weight's may be rounded to `type` before: with CUDA's
///           kernels it is not.
/// Errors:   c10::ValueError for other shapes.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_MK,
                  const std::optional<at::Tensor>& bias_M, at::ScalarType type);

/// Returns x with each element zeroed with probability `p` and the others divided by 1 - p.
/// p is rounded to 1/65536. Types: float32, float64, bfloat16. p = 0 returns x itself.
at::Tensor dropout(const at::Tensor& x, double p, DropoutStream& stream,
                   const DropoutPart& part = {});

/// Returns x + dropout(y) in x's type, which is y's or a wider one, in one pass where the device has
/// it. Shapes are the same.
at::Tensor add_dropout(const at::Tensor& x, const at::Tensor& y, double p, DropoutStream& stream,
                       const DropoutPart& part = {});

/// What a norm over the last dimension multiplies by and adds, and the type of its result.
struct NormParameters {
  at::Tensor weight_D, bias_D;
  at::ScalarType type = at::kFloat;
};

/// A residual connection and its norm.
struct NormedSum {
  at::Tensor sum;
  at::Tensor normed;
};

/// Returns sum = add_dropout(x, y, p, stream), with the same bits, and normed = at::layer_norm(sum) in norm.type;
/// forward and backward are one pass each where the device has it.
///
/// Shapes:   x, y [..., D].
/// Numerics: on the CPU sums run in float32 (float64 for float64), forward and backward; a row's results depend on
///           that row alone, and the gradients of the norm's parameters not on the number of threads.
/// Errors:   c10::ValueError for other shapes, for a y of a wider type than x's, and for a part of other than whole rows.
NormedSum add_dropout_norm(const at::Tensor& x, const at::Tensor& y, const NormParameters& norm,
                           double p, DropoutStream& stream, const DropoutPart& part = {});
/// The same without y: `sum` is x. If later sums take it instead of x, both gradients of x are added in the same pass.
NormedSum layer_norm(const at::Tensor& x, const NormParameters& norm);

/// Returns dropout(relu(x)) in one pass.
at::Tensor relu_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                        const DropoutPart& part = {});

struct LinearReluDropoutOptions {
  at::ScalarType type = at::kFloat;  ///< What the product is computed in.
  double dropout = 0;
  DropoutPart part;  ///< Of whole rows of the result.
};

/// Returns relu_dropout(linear(x, weight, bias, type)), the same elements dropped; where the device has it
/// the bias is added, and its gradient summed, in relu_dropout's passes.
///
/// Numerics: then the product is rounded to `type` before the bias is added, which is not rounded: linear() and
///           inference round the bias, and the sum once.
/// Errors:   as linear(); c10::ValueError for a part of other than whole rows.
at::Tensor linear_relu_dropout(const at::Tensor& x, const at::Tensor& weight_MK,
                               const at::Tensor& bias_M, const LinearReluDropoutOptions& options,
                               DropoutStream& stream);

/// Returns dropout(gelu(x)), the exact gelu, and dropout(x * logistic(x)) in one pass. An element's
/// result is the same bits wherever it stands and whatever stands beside it.
/// Numerics: float32 inside (float64 for float64); the error of gelu is below 1e-7 |x|, and what
///           rounding adds.
at::Tensor gelu_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                        const DropoutPart& part = {});
at::Tensor swish_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                         const DropoutPart& part = {});

/// Returns dropout(softmax(scale * scores)) over the keys that a query may see: those before its
/// sequence's length and, if `causal`, not after the query. Others get 0.
///
/// Shapes: scores_BHQK, contiguous; key_lengths_B int64 in [1, K]. part.size is that of whole
///         sentences, H Q K.
/// Errors: c10::ValueError for others.
at::Tensor masked_softmax(const at::Tensor& scores_BHQK, const at::Tensor& key_lengths_B,
                          bool causal, double scale, double p, DropoutStream& stream,
                          const DropoutPart& part = {});

/// What attention with gradients is told beside its operands.
struct AttentionOptions {
  int64_t heads = 1;  ///< A divisor of D.
  bool causal = false;
  double dropout = 0;  ///< Of the weights.
  DropoutPart part;    ///< Of the weights, as masked_softmax's.
};

/// Attention by heads with dropout and gradients: each query's mean of the values, weighted by masked_softmax(queries . keys) with a
/// scale of 1 / sqrt(D / H). Takes one number of `stream`, as masked_softmax does, and drops the same elements.
///
/// Shapes:   q_BQD; kv_BKE with a row's key before its value, E = 2 D; key_lengths_B int64 in [1, K]; returns [B, Q, D].
///           self_attention: qkv_BTE, E = 3 D, queries = keys.
/// Numerics: on the CPU scores and weights are float32 and so are their products (float64 for float64);
///           in CUDA's kernel, for bfloat16, heads of 64 elements and cards of compute capability 8.0,
///           weights are bfloat16 where a product takes them; elsewhere both are stored in the
///           operands' type.
/// Memory:   on the CPU two numbers a query and head are kept for backward, in CUDA's kernel one beside the
///           result; elsewhere weights are.
/// Errors:   c10::ValueError for others.
at::Tensor attention(const at::Tensor& q_BQD, const at::Tensor& kv_BKE,
                     const at::Tensor& key_lengths_B, const AttentionOptions& options,
                     DropoutStream& stream);
at::Tensor self_attention(const at::Tensor& qkv_BTE, const at::Tensor& key_lengths_B,
                          const AttentionOptions& options, DropoutStream& stream);

/// Where B sentences have their rows. Packed, in [N, ...]: one sentence after another, without padding. Padded, in
/// [B, longest, ...].
struct SentenceRows {
  at::Tensor lengths_B;  ///< int64 in [1, longest].
  int64_t longest = 0;
  /// int64, as many as lengths_B adds up to: which element of [B, longest] each packed row is. These are
  /// each sentence's first, as many as its length says, in order. Undefined: rows are padded.
  at::Tensor elements_N;
  bool packed() const { return elements_N.defined(); }
};

/// The same of packed rows [N, D], [M, 2 D] and [N, 3 D], or of padded ones, of which queries need no lengths. Both are packed, or none.
/// The same elements drop either way: those of weights [B, H, queries.longest, keys.longest].
///
/// Numerics: a row has the same bits either way.
/// Devices:  packed rows on the CPU alone (takes_packed_rows).
/// Errors:   c10::ValueError for others; c10::NotImplementedError for packed rows elsewhere.
at::Tensor attention(const at::Tensor& q, const SentenceRows& queries, const at::Tensor& kv,
                     const SentenceRows& keys, const AttentionOptions& options,
                     DropoutStream& stream);
at::Tensor self_attention(const at::Tensor& qkv, const SentenceRows& rows,
                          const AttentionOptions& options, DropoutStream& stream);

/// Whether attention takes packed rows on the tensor's device.
bool takes_packed_rows(const at::Tensor& tensor);

/// As torch::embedding: rows `ids` of `table_VD`, [..., D]. Its dense gradient is written where it
/// is wanted (optim/gradient_memory.h), as those of weights here; it has no second derivative.
at::Tensor embedding(const at::Tensor& table_VD, const at::Tensor& ids);

/// Sums of a batch's losses, both scalars: `loss` with label smoothing (differentiable), `nll`
/// without.
struct LossSums {
  at::Tensor loss;  ///< float32 (float64 for a float64 model).
  at::Tensor nll;   ///< float64, no gradient.
};

/// Projects hidden states to the vocabulary and sums label-smoothed cross-entropy over the rows.
///
/// Rows are taken in chunks of 1,024, so that [N, V] never exists at once; with gradients enabled the
/// forward computes them too, chunk by chunk, and backward only scales them: it runs once. Of one
/// chunk the forward computes the logits' gradient, and backward the rest: hidden_ND and weight_VD
/// must not be written to before it.
///
/// Shapes:   hidden_ND in the compute type, weight_VD (any float type; cast to hidden's), labels_N
///           int64 in [0, V).
/// Numerics: logits and their gradients in the compute type, losses summed in float32 or wider. So
///           is the weight's gradient over the chunks; a chunk's share of it may be
///           rounded to the compute type before, as in linear().
/// Errors:   c10::ValueError for other shapes and labels; c10::Error from a second backward.
/// Source:   Szegedy et al. 2016, arXiv:1512.00567, section 7, with the uniform share over all V.
LossSums smoothed_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                                const at::Tensor& labels_N, double smoothing);

/// The rows of keys and values that each query of an attention sees. A row is 2 D elements long,
/// the key before the value, in the queries' type; the caller keeps its tensor alive.
struct SeenRows {
  struct Range {
    size_t first, count;  ///< Of `rows`; count > 0.
  };
  std::vector<const void*> rows;
  std::vector<Range> of_query;
};

/// Attention by heads without dropout and gradients: each query's mean of the values it sees,
/// weighted by softmax(query . key / sqrt(D / H)). queries_ND may have gaps between rows.
///
/// A query's result does not depend on the other queries, nor on where its rows lie.
at::Tensor attend(const at::Tensor& queries_ND, const SeenRows& seen, int64_t heads);

/// One of a row's columns and its log softmax.
struct Candidate {
  int64_t column = 0;
  double log_prob = 0;
};

/// All that will be asked of a LogProbs.
struct Questions {
  int64_t greatest = 0;  ///< LogProbs::greatest's `count`, plus the number of banned columns.
  int64_t column = 0;    ///< `column` of LogProbs::at.
};

/// Log softmax of rows of scores, computed where it is asked for. Keeps the scores' tensor.
///
/// Devices: answers are given on the host, for which scores of another device than the CPU are read
///          back in one copy: all of them; or, if it is known what will be asked, the answers alone.
/// Numerics: a row's answers depend on that row alone, but for the rounding of the sum of a row that
///           another device has added up.
/// Threads: one.
class LogProbs {
 public:
  /// scores_NV in the compute type. Unless `with_sums`, `log_prob` is the score itself, but where `questions` are answered on another device.
  /// Errors: c10::Error if a row holds what is not finite.
  explicit LogProbs(const at::Tensor& scores_NV,
                    const std::optional<Questions>& questions = std::nullopt,
                    bool with_sums = true);

  /// Scores of an 8-bit product. If these have no sums, `log_prob` is the score itself.
  explicit LogProbs(const Int8Scores& scores);

  /// Row n has only the columns `columns[n]`, which here are 0, 1, ... in that order, of scores in blocks of as many columns each.
  /// For scores on the CPU. Its answers depend on these scores alone.
  /// Errors: as above.
  LogProbs(std::span<const at::Tensor> blocks, std::span<const std::span<const int32_t>> columns,
           bool with_sums = true);

  double at(int64_t row, int64_t column) const;
  /// The `count` columns with the greatest values, the greatest first and equal ones in order;
  /// fewer if there are not so many beside the `banned`, which are no candidates.
  std::vector<Candidate> greatest(int64_t row, int64_t count,
                                  std::span<const int64_t> banned) const;
  /// The column that `number`, in [0, 1), draws from all but the `banned`, in order, by weights p^exponent. Not where
  /// `questions` have told what is asked, or rows have columns of their own.
  /// Errors: c10::Error if all are banned.
  Candidate draw(int64_t row, double exponent, std::span<const int64_t> banned,
                 double number) const;
  /// The likeliest column but for the `banned`.
  /// Errors: c10::Error if all are banned.
  Candidate likeliest(int64_t row, std::span<const int64_t> banned) const;
  /// The sum of (p / likeliest p)^exponent over all columns but the `banned`: the total of the weights of `draw`.
  /// Not where `draw` is not.
  double sum_of_weights(int64_t row, double exponent, std::span<const int64_t> banned) const;
  /// All columns but the `banned`, in order. Not where `draw` is not.
  std::vector<Candidate> all(int64_t row, std::span<const int64_t> banned) const;

 private:
  void read_all(const at::Tensor& scores_NV, bool with_sums);
  int64_t columns_of(int64_t row) const;
  void check_finite() const;
  // Of each block the sum over all columns but the `banned` of exp((score - top) * exponent).
  std::vector<double> block_weights(int64_t row, double top, double exponent,
                                    std::span<const int64_t> banned) const;
  // Calls body(the row's scores by column, the greatest of its blocks).
  template <class Body>
  auto with_row(int64_t row, Body body) const;
  void read_answers(const at::Tensor& scores_NV, const Questions& questions);
  // At least the `wanted` greatest but for the `banned` among them, with their scores, in any order.
  std::vector<Candidate> likely(int64_t row, size_t wanted, std::span<const int64_t> banned) const;

  at::Tensor scores_NV_;  // of an 8-bit product as Int8Scores::blocks
  int64_t columns_ = 0;
  std::vector<int64_t> row_columns_;  // by row, where they have different ones; else empty
  int64_t top_columns_ = 0;           // of a block
  at::Tensor tops_;                   // [N, blocks of columns]: the greatest score of each block
  std::vector<double> log_sums_;
  // Of scores that stay on their device, else undefined; float64. A row: the logarithm of its sum,
  // the score in `column_`, the greatest scores, their columns.
  at::Tensor answers_;
  int64_t column_ = 0;
};

}  // namespace cohort::nmt
