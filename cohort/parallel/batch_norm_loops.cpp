// SPDX-License-Identifier: Apache-2.0
// Compiled once for each instruction set, with COHORT_LOOPS as the table's name. What it has is unnamed, and it includes nothing
// with functions: those of one instruction set must not take the place of another's.
#include "cohort/parallel/batch_norm_loops.h"

namespace cohort::parallel {
namespace {

constexpr int64_t kRows = 64;       // That are summed in float32.
constexpr int64_t kChannels = 512;  // Whose sums are on the stack.

inline float load(float x) {
  return x;
}
inline float load(BFloat16Rows x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
inline void store(float x, float* to) {
  *to = x;
}
// Round to nearest even. A NaN stays one, whatever its payload.
inline void store(float x, BFloat16Rows* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  to->bits = static_cast<uint16_t>(x != x ? 0x7fc0U : rounded);
}

// Adds to sums_2C what body(row's first element, channel, sum, other sum) adds to those of each channel.
template <class Body>
__attribute__((always_inline)) inline void sum_rows(int64_t rows, int64_t channels, double* sums_2C,
                                                    const Body& body) {
  for (int64_t tile = 0; tile < channels; tile += kChannels) {
    const int64_t end = channels - tile < kChannels ? channels : tile + kChannels;
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t last = rows - first < kRows ? rows : first + kRows;
      float sum[kChannels] = {}, other[kChannels] = {};
      for (int64_t row = first; row < last; ++row) {
#pragma omp simd
        for (int64_t c = tile; c < end; ++c)
          body(row * channels + c, c, sum[c - tile], other[c - tile]);
      }
      for (int64_t c = tile; c < end; ++c) {
        sums_2C[c] += static_cast<double>(sum[c - tile]);
        sums_2C[channels + c] += static_cast<double>(other[c - tile]);
      }
    }
  }
}

template <class T>
void statistics(const T* x, int64_t rows, int64_t channels, const float* shift, double* sums_2C) {
  sum_rows(rows, channels, sums_2C, [=](int64_t i, int64_t c, float& sum, float& squares) {
    const float deviation = load(x[i]) - shift[c];
    sum += deviation;
    squares += deviation * deviation;
  });
}

template <bool kAdds, class T>
void forward_rows(const T* x, const T* residual, int64_t rows, int64_t channels, const float* mean,
                  const float* scale, const float* bias, T* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      float y = (load(x[first + c]) - mean[c]) * scale[c] + bias[c];
      if constexpr (kAdds) y += load(residual[first + c]);
      store(y < 0 ? 0 : y, out + first + c);
    }
  }
}

template <class T>
void forward(const T* x, const T* residual, int64_t rows, int64_t channels, const float* mean,
             const float* scale, const float* bias, T* out) {
  if (residual != nullptr) {
    forward_rows<true>(x, residual, rows, channels, mean, scale, bias, out);
  } else {
    forward_rows<false>(x, residual, rows, channels, mean, scale, bias, out);
  }
}

template <bool kWrites, class T>
void backward_sums_of_rows(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
                           const float* mean, T* masked, double* sums_2C) {
  sum_rows(rows, channels, sums_2C, [=](int64_t i, int64_t c, float& sum, float& dot) {
    const float all = load(grad[i]);
    const float g = load(out[i]) <= 0 ? 0 : all;
    if constexpr (kWrites) store(g, masked + i);
    sum += g;
    dot += g * (load(x[i]) - mean[c]);
  });
}

template <class T>
void backward_sums(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
                   const float* mean, T* masked, double* sums_2C) {
  if (masked != nullptr) {
    backward_sums_of_rows<true>(grad, out, x, rows, channels, mean, masked, sums_2C);
  } else {
    backward_sums_of_rows<false>(grad, out, x, rows, channels, mean, masked, sums_2C);
  }
}

template <bool kMasks, class T>
void backward_rows(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
                   const float* mean, const float* scale, const float* slope, const float* offset,
                   T* grad_x) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * channels;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      float g = load(grad[first + c]);
      if constexpr (kMasks) g = load(out[first + c]) <= 0 ? 0 : g;
      store(g * scale[c] + (load(x[first + c]) - mean[c]) * slope[c] + offset[c],
            grad_x + first + c);
    }
  }
}

template <class T>
void backward(const T* grad, const T* out, const T* x, int64_t rows, int64_t channels,
              const float* mean, const float* scale, const float* slope, const float* offset,
              T* grad_x) {
  if (out != nullptr) {
    backward_rows<true>(grad, out, x, rows, channels, mean, scale, slope, offset, grad_x);
  } else {
    backward_rows<false>(grad, out, x, rows, channels, mean, scale, slope, offset, grad_x);
  }
}

template <class T>
constexpr BatchNormLoopsOf<T> table() {
  return {statistics<T>, forward<T>, backward_sums<T>, backward<T>};
}

}  // namespace

namespace batch_norm {
extern const BatchNormLoops COHORT_LOOPS;
const BatchNormLoops COHORT_LOOPS = {table<float>(), table<BFloat16Rows>()};
}  // namespace batch_norm

}  // namespace cohort::parallel
