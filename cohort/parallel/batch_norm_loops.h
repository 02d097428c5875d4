// SPDX-License-Identifier: Apache-2.0
// What batch_norm_relu computes on the CPU, with rows [R, C] of the channels of R pixels: sums over rows, and passes over
// elements. Once for each instruction set, in batch_norm_loops.cpp. No header of libtorch.
#pragma once
#include <cstdint>

namespace cohort::parallel {

/// A bfloat16's bits, as in memory.
struct BFloat16Rows {
  uint16_t bits;
};

/// Of elements T; all else is float32 but the sums, which are float32 over 64 rows and float64 over these.
template <class T>
struct BatchNormLoopsOf {
  /// Adds the sums of x - shift and of its square to sums_2C.
  void (*statistics)(const T* x, int64_t rows, int64_t channels, const float* shift,
                     double* sums_2C);
  /// out = max((x - mean) * scale + bias + residual, 0); `residual` may be null.
  void (*forward)(const T* x, const T* residual, int64_t rows, int64_t channels, const float* mean,
                  const float* scale, const float* bias, T* out);
  /// Adds the sums of g and of g * (x - mean) to sums_2C. g is `grad` where `out` is above 0, and 0 elsewhere. Writes g to
  /// `masked` if that is not null.
  void (*backward_sums)(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
                        const float* mean, T* masked, double* sums_2C);
  /// grad_x = g * scale + (x - mean) * slope + offset; with `out` null, g is `grad`.
  void (*backward)(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
                   const float* mean, const float* scale, const float* slope, const float* offset,
                   T* grad_x);
};

struct BatchNormLoops {
  BatchNormLoopsOf<float> f32;
  BatchNormLoopsOf<BFloat16Rows> bf16;
};

/// Returns what this processor can run, the fastest first; null ends the list.
const BatchNormLoops* const* supported_batch_norm_loops();

/// Those in use: the first that is supported, or those of the last use_batch_norm_loops.
const BatchNormLoops& batch_norm_loops();
void use_batch_norm_loops(const BatchNormLoops& loops);  ///< For tests.

}  // namespace cohort::parallel
