// SPDX-License-Identifier: Apache-2.0
// Loops over raw memory for which libtorch has no fused form. No torch, no threads, no allocation.
//
// loops.cpp is compiled once per instruction set; `loops()` picks the best for this machine.
// Legend: R rows, C columns (last dimension, contiguous). bf16 values are 16-bit patterns.
// Sums run in float (double for double), in an order that the instruction set fixes.
#pragma once
#include <cstdint>

namespace cohort::nmt {

struct BFloat16Bits {
  uint16_t bits;
};

/// What sums of T run in.
template <class T>
struct SumOf {
  using Type = T;
};
template <>
struct SumOf<BFloat16Bits> {
  using Type = float;
};

/// How a dropout decides: element i is dropped if the 16-bit hash of (key, first + i) is below
/// `threshold`. Nothing is stored: backward hashes again. Kept elements are multiplied by `scale`.
struct DropoutRule {
  uint64_t key = 0;
  uint16_t threshold = 0;  ///< round(p * 65536); 0 keeps everything.
  float scale = 1;         ///< 65536 / (65536 - threshold).
  int64_t first = 0;       ///< Number of the first element, where these are some of many.
};

/// Which keys a query row sees: key < length of its sequence and, if causal, key <= query.
struct SoftmaxShape {
  int64_t batch = 0, heads = 0, queries = 0, keys = 0;
  const int64_t* key_lengths = nullptr;  ///< [batch], each in [1, keys].
  bool causal = false;
  float scale = 1;  ///< Multiplies the scores first.
};

/// Sizes of attention by heads; a row of D elements holds one head after the other.
struct HeadShape {
  int64_t heads = 0, width = 0;  ///< D = heads * width.
  float scale = 1;               ///< Multiplies the scores.
};

/// One head of one sentence's attention with gradients. Rows have `width` elements; from one to the next are `query_stride`
/// elements, or `key_stride` of keys and values.
template <class T>
struct AttentionHead {
  const T* queries = nullptr;
  const T* keys = nullptr;
  const T* values = nullptr;
  int64_t query_stride = 0, key_stride = 0;
  int64_t num_queries = 0;
  int64_t num_keys = 0;  ///< That a query may see, > 0; if `causal`, none after itself.
  int64_t key_rows = 0;  ///< Of keys; those behind `num_keys` get gradients of 0.
  int64_t all_keys = 0;  ///< Element (query, key) has the number query * all_keys + key.
  int64_t width = 0;
  bool causal = false;
  bool next_behind = false;  ///< Whether the next head lies behind this one, in the same rows.
  float scale = 1;           ///< Multiplies the scores.
};

/// Gradients as their operands lie.
template <class T>
struct AttentionHeadGrads {
  T* queries = nullptr;
  T* keys = nullptr;
  T* values = nullptr;
};

/// out = rule(softmax(scale * queries keys^T)) values, and its gradients.
template <class T>
struct AttentionLoops {
  using Sum = typename SumOf<T>::Type;
  /// Returns the elements of `scratch`.
  int64_t (*scratch)(int64_t keys, int64_t width);
  /// stats [queries, 2]: each query's greatest score, and the reciprocal of its sum of exponentials.
  void (*forward)(const AttentionHead<T>& head, DropoutRule rule, Sum* scratch, T* out,
                  int64_t out_stride, Sum* stats);
  /// Computes the softmax again, with the same bits.
  void (*backward)(const AttentionHead<T>& head, DropoutRule rule, const Sum* stats, const T* grad,
                   int64_t grad_stride, Sum* scratch, AttentionHeadGrads<T> out);
};

/// Added to a variance before its root is taken.
inline constexpr double kNormEpsilon = 1e-5;

/// Of a norm, [width] each.
template <class Sum>
struct NormWeights {
  const Sum* weight = nullptr;
  const Sum* bias = nullptr;
  int64_t width = 0;
};

/// One row of a residual connection and of the norm behind it. Results are functions of the row alone.
template <class Y, class Out>
struct NormLoops {
  using Sum = typename SumOf<Y>::Type;
  /// sum = x + rule(y), rule(y) rounded to Y; out = (sum - mean) * inverse * weight + bias with
  /// inverse = 1 / sqrt(variance + kNormEpsilon). stats [2]: mean and inverse. Without y (null) the
  /// sum is x, and `sum` is not written.
  void (*forward)(const Sum* x, const Y* y, DropoutRule rule, NormWeights<Sum> norm, Sum* sum,
                  Out* out, Sum* stats);
  /// grad_x from the gradients of `sum` (null: none) and of `out`, and grad_y (null: not asked for) =
  /// rule(grad_x). The row's gradients of weight and bias are added to what is there.
  void (*backward)(const Sum* sum, const Sum* stats, NormWeights<Sum> norm, const Sum* grad_sum,
                   const Out* grad_out, DropoutRule rule, Sum* grad_x, Y* grad_y, Sum* grad_weight,
                   Sum* grad_bias);
};

/// A multiple of every instruction set's registers.
inline constexpr int64_t kScoresUnit = 16;

/// Columns whose greatest value `log_sum_exp` reports together.
inline constexpr int64_t kTopColumns = 256;

/// An activation and the dropout behind it. What an element comes to is a function of that element:
/// not of how many there are, nor of where it stands among them.
template <class T>
struct ActivationOf {
  /// out[i] = rule(f(x[i])).
  void (*forward)(const T* x, T* out, int64_t n, DropoutRule rule);
  /// grad_x[i] = rule(f'(x[i]) * grad[i]).
  void (*backward)(const T* x, const T* grad, T* grad_x, int64_t n, DropoutRule rule);
};

template <class T>
struct LoopsOf {
  using Sum = typename SumOf<T>::Type;
  /// out[i] = rule(x[i]).
  void (*dropout)(const T* x, T* out, int64_t n, DropoutRule rule);
  void (*narrow_dropout)(const Sum* x, T* out, int64_t n, DropoutRule rule);  ///< Rounds once.
  /// out[i] = x[i] + rule(y[i]), the latter rounded to T.
  void (*add_dropout)(const Sum* x, const T* y, Sum* out, int64_t n, DropoutRule rule);
  /// out[i] = rule(max(x[i], 0)).
  void (*relu_dropout)(const T* x, T* out, int64_t n, DropoutRule rule);
  /// grad_x[i] = out[i] > 0 ? grad[i] * scale : 0.
  void (*relu_dropout_backward)(const T* out, const T* grad, T* grad_x, int64_t n, float scale);
  /// row[i] = rule(max(row[i] + bias[i], 0)).
  void (*bias_relu_dropout)(T* row, const Sum* bias, int64_t n, DropoutRule rule);
  /// As relu_dropout_backward; and grad_bias[i] += the same before it is rounded to T.
  void (*bias_relu_dropout_backward)(const T* out, const T* grad, T* grad_x, Sum* grad_bias,
                                     int64_t n, float scale);
  NormLoops<T, T> norm;
  NormLoops<T, Sum> wide_norm;
  ActivationOf<T> gelu;   ///< f(x) = x times the normal distribution's share below x.
  ActivationOf<T> swish;  ///< f(x) = x / (1 + exp(-x)).
  /// probs = softmax of visible scores (0 elsewhere); dropped = rule(probs), unless it is null.
  void (*softmax)(const T* scores, T* probs, T* dropped, SoftmaxShape shape, DropoutRule rule);
  /// grad_scores from the gradient of `dropped`, recomputing the rule.
  void (*softmax_backward)(const T* probs, const T* grad, T* grad_scores, SoftmaxShape shape,
                           DropoutRule rule);
  AttentionLoops<T> attention;
  /// For each row of logits [R, C]: adds the loss -(1-e) log p[label] - e/C sum log p to sums[0]
  /// and -log p[label] to sums[1]; then, if `with_gradient`, overwrites the row by p - q. labels in
  /// [0, C).
  void (*cross_entropy)(T* logits, const int64_t* labels, int64_t rows, int64_t columns,
                        double smoothing, bool with_gradient, float* scratch, double* sums);
  /// Attention of one query over `count` > 0 rows of 2 D elements, the key before the value:
  /// out[D] = for each head the mean of the values, weighted by softmax(scale * query . key).
  /// scratch [D + heads * (count, rounded up to kScoresUnit)]. The result is a function of these
  /// operands alone: not of how many queries there are, nor of where their rows lie.
  void (*attend)(const T* query, const T* const* rows, int64_t count, HeadShape shape, Sum* scratch,
                 T* out);
  /// Returns log(sum of exp(row)) over C columns or, unless `with_sum`, 0; NaN or infinity if any of them is not finite.
  /// tops[i] becomes the greatest of columns [i, i + 1) * kTopColumns.
  double (*log_sum_exp)(const T* row, int64_t columns, bool with_sum, Sum* tops);
  /// Returns the sum of exp(factor * (x[i] - top)); no x[i] is above `top`.
  Sum (*sum_of_exp)(const T* x, int64_t n, Sum top, Sum factor);
};

/// Columns of a block of a packed float32 matrix.
inline constexpr int64_t kPackedColumns = 32;

/// out = x block + bias, for one block of a matrix. Each sum begins with 0 and adds its products in the order of
/// depth, then the bias: a row of `out` is a function of that row of x.
struct PackedProduct {
  const float* x = nullptr;  ///< [rows, depth]
  int64_t rows = 0, depth = 0;
  const float* block = nullptr;  ///< [depth, kPackedColumns], of which `columns` > 0 are taken.
  const float* bias = nullptr;   ///< [columns], or null: 0.
  int64_t columns = 0;
  float* out = nullptr;  ///< Rows of `columns`, `out_stride` apart.
  int64_t out_stride = 0;
};

/// An operand of a product in bfloat16. Element (i, k), k along the sum, is data[i * outer + k * inner]; one of the
/// strides is 1.
struct MatrixBits {
  const BFloat16Bits* data = nullptr;
  int64_t outer = 0, inner = 0;
};

/// Rows of the first operand, or columns of the second, that a panel holds; and of its depth, what is padded with 0 to
/// whole units. A panel has kPanelWidth * depth elements so.
inline constexpr int64_t kPanelWidth = 32, kPanelDepth = 32;

/// The product of packed panels. An element's sum is a function of its row, its column and the depth.
struct PanelProduct {
  const BFloat16Bits* row_panels = nullptr;
  const BFloat16Bits* column_panels = nullptr;
  int64_t rows = 0, columns = 0, depth = 0;
  bool add = false;       ///< To what is in `sums`.
  float* sums = nullptr;  ///< Results, unless `out` takes them.
  int64_t sums_stride = 0;
  const float* bias = nullptr;  ///< [columns], added to `out`; null: none.
  BFloat16Bits* out = nullptr;  ///< Results, rounded.
  int64_t out_stride = 0;
};

/// Products of bfloat16 with sums in float32, subnormal numbers as 0. Null where the instruction set has none of bfloat16.
struct PanelLoops {
  void (*pack_rows)(const MatrixBits& matrix, int64_t rows, int64_t depth, BFloat16Bits* panels);
  void (*pack_columns)(const MatrixBits& matrix, int64_t columns, int64_t depth,
                       BFloat16Bits* panels);
  void (*multiply)(const PanelProduct& product);
};

/// Columns of a block of an 8-bit matrix. Of a block [depth, kInt8Columns] the elements of four neighbouring rows lie
/// together: [depth / 4, kInt8Columns, 4].
inline constexpr int64_t kInt8Columns = 64;

/// Sums of 8-bit products, and what they stand for: out = (sums - offsets) * row's scale * scales + bias.
struct Int8Tile {
  const int32_t* sums = nullptr;  ///< [rows, kInt8Columns], of which `columns` are taken.
  int64_t rows = 0, columns = 0;
  const float* row_scales = nullptr;  ///< [rows]
  const float* scales = nullptr;      ///< [columns], as what follows
  const int32_t* offsets = nullptr;   ///< Null: none.
  const float* bias = nullptr;        ///< Null: none.
  float* out = nullptr;               ///< Rows of `columns`, `out_stride` apart.
  int64_t out_stride = 0;
  float* tops = nullptr;         ///< Unless null: each row's greatest, `tops_stride` apart ...
  float* sums_of_exp = nullptr;  ///< ... and, unless null, its sum of exp(x - greatest). Null:
                                 ///< tops are NaN of rows with a number that is not finite.
  int64_t tops_stride = 0;
};

/// Of 8-bit matrices. Every table gives the same bits, but for sums of exponentials.
struct Int8Loops {
  /// out[i] = rint(x[i] * (127 / max |x|)), ties to even; returns the scale: max |x| / 127, or 0 (and all 0) if
  /// nothing is above 1e-36, or NaN (and all 0) if a number is not finite.
  float (*quantize)(const float* x, int64_t n, int8_t* out);
  /// sums [R, kInt8Columns] = rows [R, depth] * block; depth is a multiple of 4, no row has -128.
  void (*product)(const int8_t* rows, int64_t num_rows, int64_t depth, const int8_t* block,
                  int32_t* sums);
  /// The product of the two scales is rounded, then the whole.
  void (*scale)(const Int8Tile& tile);
  /// Returns log(sum of sums[i] * exp(tops[i])), not finite if any of them is not.
  double (*log_sum)(const float* tops, const float* sums, int64_t n);
};

struct Loops {
  const char* name;  ///< Instruction set: "amx", "avx512_bf16", "avx512", "avx2" or "sse2".
  LoopsOf<float> f32;
  LoopsOf<double> f64;
  LoopsOf<BFloat16Bits> bf16;
  void (*packed_product)(const PackedProduct& product);
  PanelLoops panels;
  Int8Loops int8;
};

/// Whether these values of ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA (null: unset) let oneDNN use AMX, as it reads them: the
/// first that is not empty counts, in any case of letters, and what names no instruction set is no limit.
bool allow_amx(const char* onednn, const char* dnnl);

/// Returns the tables of the instruction sets that this machine has, the best first, then null.
const Loops* const* supported_loops();

/// Returns the table in use: the best, unless `use_loops` has named another.
const Loops& loops();

/// For tests of every table on one machine.
/// Threads: while none is in a kernel.
void use_loops(const Loops& table);

}  // namespace cohort::nmt
