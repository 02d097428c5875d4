// SPDX-License-Identifier: Apache-2.0
// What fused.h computes with, chosen by the device of its tensors: cpu/ has loops over the host's
// memory, aten/ plain operations of ATen, for every device with float64, cuda/ kernels for some of
// these, where libcohort_cuda.so was loaded. None of them records gradients. Legend as in fused.h.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <optional>
#include <utility>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

/// What one call drops. The same elements fall on every device.
struct Dropping {
  DropoutRule rule;
  DropoutPart part;
};

/// Which keys a query sees: those before its sequence's length and, if `causal`, not after it.
struct SoftmaxMask {
  at::Tensor key_lengths_B;
  bool causal = false;
  float scale = 1;  ///< Multiplies the scores first.
};

/// Element by element, with the dropout behind it.
struct ActivationKernels {
  /// Returns dropped(f(x)).
  at::Tensor (*forward)(const at::Tensor& x, const Dropping& dropping) = nullptr;
  /// Returns f'(x) * dropped(grad).
  at::Tensor (*backward)(const at::Tensor& x, const at::Tensor& grad,
                         const Dropping& dropping) = nullptr;
};

/// Sentences of packed rows (SentenceRows), beside the lengths of a SoftmaxMask. Weights are numbered as [B, H, queries, keys].
struct PackedSentences {
  at::Tensor query_lengths_B;     ///< Undefined: rows are padded.
  int64_t queries = 0, keys = 0;  ///< Of the longest.
};

/// What attention by heads takes, or the gradients of that: rows of D elements, one head after the other, with gaps between
/// rows or without. Those of keys and of values are equally far apart.
struct AttentionOperands {
  at::Tensor q_BQD, k_BKD, v_BKD;
  int64_t heads = 1;
  PackedSentences packed{};  ///< If it has lengths, the tensors are packed rows [N, D].
};

/// Attention with the softmax inside, which is not kept. Null: by products and `softmax`.
struct AttentionKernels {
  /// Whether there is one for what a projection wrote: x is queries alone if `kv` is defined. Null: for
  /// all.
  bool (*takes)(const at::Tensor& x, const at::Tensor& kv, int64_t head_width) = nullptr;
  bool takes_packed = false;  ///< Whether operands may be packed rows. Then so are all operations'.
  /// Returns [B, Q, D], or packed rows as q's, and what backward needs to compute the softmax again.
  std::pair<at::Tensor, at::Tensor> (*forward)(const AttentionOperands& operands,
                                               const SoftmaxMask& mask,
                                               const Dropping& dropping) = nullptr;
  /// From what forward returned. Writes all of `grads`, whose rows lie as those of `operands`.
  void (*backward)(const AttentionOperands& operands, const at::Tensor& out_BQD,
                   const at::Tensor& stats, const at::Tensor& grad_BQD, const SoftmaxMask& mask,
                   const Dropping& dropping, const AttentionOperands& grads) = nullptr;
};

/// A residual connection and the norm behind it, over the last dimension. Null: by `add_dropout` and at::layer_norm.
struct NormKernels {
  /// Whether there is one for these types; y, which is added to x, is undefined if nothing is.
  bool (*takes)(const at::Tensor& x, const at::Tensor& y, const NormParameters& norm) = nullptr;
  struct Result {
    at::Tensor sum, normed, stats;  ///< sum: x, if nothing is added.
  };
  Result (*forward)(const at::Tensor& x, const at::Tensor& y, const NormParameters& norm,
                    const Dropping& dropping) = nullptr;
  struct Grads {
    at::Tensor x, y, weight, bias;
  };
  /// From what forward returned; grad_sum may be undefined. The gradient of y is in `type_of_y`; without, there is none.
  Grads (*backward)(const at::Tensor& sum, const at::Tensor& stats, const at::Tensor& weight,
                    const at::Tensor& grad_sum, const at::Tensor& grad_normed,
                    std::optional<at::ScalarType> type_of_y, const Dropping& dropping) = nullptr;
};

/// What follows a product with a bias, in one pass. Null: by addition and `relu_dropout`.
struct BiasReluDropoutKernels {
  bool (*takes)(const at::Tensor& bias_M, at::ScalarType of_product) = nullptr;
  /// product_NM = dropped(max(product_NM + bias_M, 0)). dropping.part is of whole rows.
  void (*forward)(const at::Tensor& product_NM, const at::Tensor& bias_M,
                  const Dropping& dropping) = nullptr;
  /// Returns the gradients of the product, as relu_dropout_backward, and of the bias, from what forward has made.
  std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& out_NM, const at::Tensor& grad_NM,
                                                float scale) = nullptr;
};

/// What a product adds. One of both at most.
struct ProductOptions {
  at::Tensor bias_M{};  ///< To each row, in the operands' type, which is out's; undefined: nothing.
  bool add = false;     ///< What is in `out`.
};

/// Operands are contiguous unless it says otherwise, of one device, and float32, float64 or bfloat16 unless it says another
/// type. Results are of the operands' type; sums run in float32 (float64 for float64).
struct Kernels {
  bool has_inference = false;  ///< Whether inference has operations of its own: fused.h's attend.
  at::Tensor (*dropout)(const at::Tensor& x, const Dropping& dropping) = nullptr;
  /// Returns x + dropout(y) in x's type, which is y's or a wider one.
  at::Tensor (*add_dropout)(const at::Tensor& x, const at::Tensor& y,
                            const Dropping& dropping) = nullptr;
  /// Returns dropout(grad) in `type`, grad's or a narrower one.
  at::Tensor (*add_dropout_backward)(const at::Tensor& grad, at::ScalarType type,
                                     const Dropping& dropping) = nullptr;
  at::Tensor (*relu_dropout)(const at::Tensor& x, const Dropping& dropping) = nullptr;
  /// Returns grad * scale where `out`, of relu_dropout, is above 0, and 0 elsewhere.
  at::Tensor (*relu_dropout_backward)(const at::Tensor& out, const at::Tensor& grad,
                                      float scale) = nullptr;
  BiasReluDropoutKernels bias_relu_dropout;
  NormKernels norm;
  ActivationKernels gelu;
  ActivationKernels swish;
  /// Returns the softmax of visible scores_BHQK, 0 elsewhere, and what dropout leaves of it
  /// (undefined if nothing is to be dropped).
  std::pair<at::Tensor, at::Tensor> (*softmax)(const at::Tensor& scores_BHQK,
                                               const SoftmaxMask& mask,
                                               const Dropping& dropping) = nullptr;
  /// Returns the gradient of the scores from that of what `softmax` dropped.
  at::Tensor (*softmax_backward)(const at::Tensor& probs_BHQK, const at::Tensor& grad_BHQK,
                                 const SoftmaxMask& mask, const Dropping& dropping) = nullptr;
  AttentionKernels attention;
  /// out = a b: [N, K] by [K, M], either of which may be transposed. Options as they say. `out` is of the operands' type
  /// or a wider one; sums may be rounded to the operands' type before that.
  void (*product)(const at::Tensor& a, const at::Tensor& b, const ProductOptions& options,
                  at::Tensor& out) = nullptr;
  /// Adds the rows' smoothed losses to sums[0] and -log p[label] to sums[1], both float64; then, if
  /// `with_gradient`, overwrites logits_NV by the losses' gradient. labels_N int64 in [0, V).
  void (*cross_entropy)(const at::Tensor& logits_NV, const at::Tensor& labels_N, double smoothing,
                        bool with_gradient, const at::Tensor& sums) = nullptr;
};

/// Returns the kernels of the tensor's device.
const Kernels& kernels_for(const at::Tensor& tensor);

/// Checks int64 numbers that kernels index by. What lies elsewhere than on the CPU is not read back:
/// its device checks it, if anyone.
/// Errors: c10::ValueError that begins with `what` for a number below `least` or above `most`.
void check_range(const char* what, const at::Tensor& numbers, int64_t least, int64_t most);

/// For tests: takes those of aten/ on the CPU, too.
/// Threads: while none is in a kernel.
void use_aten_kernels(bool on);

struct CudaLaunches;

/// Returns what cuda/ launches on tensors of `device` (cuda/launches.h); null: others serve them.
/// Errors: c10::Error if libcohort_cuda.so is of another version.
const CudaLaunches* cuda_launches_for(c10::DeviceType device);

/// For tests: cuda/ serves tensors of `device`, too, by these launches, until they are null.
/// Threads: while none is in a kernel.
void use_cuda_launches(const CudaLaunches* launches, c10::DeviceType device);

}  // namespace cohort::nmt
