// SPDX-License-Identifier: Apache-2.0
// What libcohort_cuda.so gives: launches of CUDA kernels as functions of pointers, sizes and a
// stream. nvcc compiles them without libtorch's headers, the others without CUDA's, and the object
// needs no symbol of the program. Legend as in fused.h.
#pragma once
#include <cstdint>

#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

enum class ElementType : int32_t { kFloat32, kFloat64, kBFloat16 };

/// A rule for a tensor whose element i has the number
/// rule.first + i / part_size * part_whole + i % part_size.
struct NumberedRule {
  DropoutRule rule;
  int64_t part_size = 1, part_whole = 1;
};

/// out[i] = rule(in[i]), or rule(max(in[i], 0)), for `count` elements. Types: out's is in's, or
/// bfloat16 where in's is float32. With `added`, of out's type: out[i] = added[i] + rule(in[i]), the
/// latter rounded to in's type before; then out may be float32 where in is bfloat16, too.
struct DropLaunch {
  const void* in = nullptr;
  const void* added = nullptr;
  void* out = nullptr;  ///< May be `in`, if the types are the same.
  ElementType in_type = ElementType::kFloat32;
  ElementType out_type = ElementType::kFloat32;
  int64_t count = 0;
  NumberedRule dropout;
  bool relu = false;
};

/// to[i] = out[i] > 0 ? grad[i] * scale : 0, for `count` elements of one type; `out` is what a
/// DropLaunch with `relu` made.
struct ReluBackwardLaunch {
  const void* out = nullptr;
  const void* grad = nullptr;
  void* to = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t count = 0;
  float scale = 1;
};

/// Rows of scores [batch, heads, queries, keys]: probs = softmax(scale * scores) over the keys that
/// a query sees (0 elsewhere), dropped = rule(probs), unless it is null. A query that sees none has
/// NaN for each.
struct SoftmaxLaunch {
  const void* scores = nullptr;
  void* probs = nullptr;
  void* dropped = nullptr;
  ElementType type = ElementType::kFloat32;  ///< Of all three.
  SoftmaxShape shape;                        ///< key_lengths on the device.
  NumberedRule dropout;
};

/// to = probs * (g - sum(probs * g)) * scale for each of `rows` rows of `keys`, g = rule(grad).
struct SoftmaxBackwardLaunch {
  const void* probs = nullptr;
  const void* grad = nullptr;
  void* to = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t rows = 0, keys = 0;
  float scale = 1;
  NumberedRule dropout;
};

inline constexpr int kAttentionHeadWidth = 64;

/// Rows of sentences, `rows` of each, `stride` elements apart; in a row the heads of
/// kAttentionHeadWidth elements stand side by side.
struct HeadRows {
  void* data = nullptr;
  int64_t rows = 0, stride = 0;
};

/// out = rule(softmax(scale * q k^T)) v for each head, of bfloat16, over the keys that a query sees; the logarithm
/// of each row's sum of exponentials goes into log_sums_BHQ. A query that sees no key has NaN.
struct AttentionLaunch {
  HeadRows q, k, v, out;
  float* log_sums_BHQ = nullptr;
  SoftmaxShape shape;  ///< key_lengths on the device.
  NumberedRule dropout;
};

/// The gradients of an AttentionLaunch, whose results `out` and `log_sums_BHQ` are. dots_BHQ is
/// overwritten.
struct AttentionBackwardLaunch {
  HeadRows q, k, v, out, grad_out;
  const float* log_sums_BHQ = nullptr;
  float* dots_BHQ = nullptr;
  HeadRows grad_q, grad_k, grad_v;
  SoftmaxShape shape;
  NumberedRule dropout;
};

/// For each row n of logits: losses_N2[n] becomes its smoothed loss and -log p[label], as in
/// Kernels::cross_entropy; then, if `with_gradient`, the row becomes the loss's gradient.
/// Numerics: sums as in Kernels, in an order that columns alone decide. A label outside of
///           [0, columns) makes both losses NaN; no memory outside of the row is touched.
struct CrossEntropyLaunch {
  void* logits_NV = nullptr;
  const int64_t* labels_N = nullptr;
  double* losses_N2 = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t rows = 0, columns = 0;
  double smoothing = 0;
  bool with_gradient = false;
};

/// Of CudaLaunches and its arguments; an object of another version is refused.
inline constexpr int kCudaLaunchesVersion = 2;

/// Launches on memory of the current device, behind what `stream`, a cudaStream_t, holds. They do
/// not wait, and return null, or why nothing was launched: text that lives for ever.
/// Threads: any.
struct CudaLaunches {
  int version = kCudaLaunchesVersion;
  const char* (*drop)(const DropLaunch& launch, void* stream) = nullptr;
  const char* (*relu_backward)(const ReluBackwardLaunch& launch, void* stream) = nullptr;
  const char* (*softmax)(const SoftmaxLaunch& launch, void* stream) = nullptr;
  const char* (*softmax_backward)(const SoftmaxBackwardLaunch& launch, void* stream) = nullptr;
  /// Whether the current device has what `attention` is made of: compute capability 8.0.
  bool (*has_attention)() = nullptr;
  const char* (*attention)(const AttentionLaunch& launch, void* stream) = nullptr;
  const char* (*attention_backward)(const AttentionBackwardLaunch& launch, void* stream) = nullptr;
  const char* (*cross_entropy)(const CrossEntropyLaunch& launch, void* stream) = nullptr;
};

/// The C function that the object exports; it returns a `const CudaLaunches*`, good for ever.
inline constexpr const char* kCudaLaunchesEntry = "cohort_cuda_launches";

}  // namespace cohort::nmt
