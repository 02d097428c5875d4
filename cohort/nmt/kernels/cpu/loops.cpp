// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set, with COHORT_LOOPS naming the table that it defines.
// Includes nothing with inline functions that other files share: the linker might keep the wrong
// copy.
#include "cohort/nmt/kernels/cpu/loops.h"

#include "cohort/nmt/kernels/cpu/arithmetic.h"
#include "cohort/nmt/kernels/cpu/attention.h"
#include "cohort/nmt/kernels/cpu/packed_product.h"
#include "cohort/nmt/kernels/cpu/residual.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
#include "cohort/nmt/kernels/cpu/panel_product.h"
#endif

namespace cohort::nmt {
namespace {

// The standard normal distribution at x: its share below x, and its density. The share's error in
// float is below 1e-7: Abramowitz and Stegun 1964, equation 7.1.26, at |x| / sqrt(2).
inline void normal(float x, float& below, float& density) {
  const float bell = exponential(-0.5F * x * x);
  const float t = 1 / (1 + 0.231641888F * (x < 0 ? -x : x));
  float p = 1.061405429F;
  p = p * t - 1.453152027F;
  p = p * t + 1.421413741F;
  p = p * t - 0.284496736F;
  p = p * t + 0.254829592F;
  const float tail = 0.5F * p * t * bell;
  below = x < 0 ? tail : 1 - tail;
  density = 0.398942280F * bell;
}
inline void normal(double x, double& below, double& density) {
  below = 0.5 * __builtin_erfc(-0.70710678118654752 * x);
  density = 0.39894228040143268 * exponential(-0.5 * x * x);
}
inline double logarithm(double x) {
  return __builtin_log(x);
}

template <class T>
void relu_dropout(const T* x, T* out, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc value = M::load(x[first + i]);
      const typename M::Acc kept = value <= 0 ? 0 : value * rule.scale;
      out[first + i] = M::store(random[i] < rule.threshold ? 0 : kept);
    }
  });
}

template <class T>
void relu_dropout_backward(const T* out, const T* grad, T* grad_x, int64_t n, float scale) {
  using M = Math<T>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const typename M::Acc passed = M::load(grad[i]) * scale;
    grad_x[i] = M::store(M::load(out[i]) > 0 ? passed : 0);
  }
}

// Rows of a product, in place.
template <class T>
void bias_relu_dropout(T* row, const typename Math<T>::Acc* bias, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc value = M::load(row[first + i]) + bias[first + i];
      const typename M::Acc kept = value <= 0 ? 0 : value * rule.scale;
      row[first + i] = M::store(random[i] < rule.threshold ? 0 : kept);
    }
  });
}

template <class T>
void bias_relu_dropout_backward(const T* out, const T* grad, T* grad_x,
                                typename Math<T>::Acc* grad_bias, int64_t n, float scale) {
  using M = Math<T>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const typename M::Acc passed = M::load(out[i]) > 0 ? M::load(grad[i]) * scale : 0;
    grad_x[i] = M::store(passed);
    grad_bias[i] += passed;
  }
}

struct Gelu {
  template <class Acc>
  static Acc value(Acc x) {
    Acc below, density;
    normal(x, below, density);
    return x * below;
  }
  template <class Acc>
  static Acc slope(Acc x) {
    Acc below, density;
    normal(x, below, density);
    return below + x * density;
  }
};

struct Swish {
  template <class Acc>
  static Acc logistic(Acc x) {
    const Acc e = exponential(x < 0 ? x : -x);
    return (x < 0 ? e : 1) / (1 + e);
  }
  template <class Acc>
  static Acc value(Acc x) {
    return x * logistic(x);
  }
  template <class Acc>
  static Acc slope(Acc x) {
    const Acc share = logistic(x);
    return share * (1 + x * (1 - share));
  }
};

// Of an activation whole blocks are computed, whatever lies behind the last element: what is left
// over when registers are full, the compiler may compute by other instructions, with another
// rounding.
template <class T, class Function>
void activate(const T* x, T* out, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  typename M::Acc values[kBlock] = {};
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
    for (int64_t i = 0; i < count; ++i) values[i] = M::load(x[first + i]);
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) values[i] = Function::value(values[i]);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc kept = values[i] * rule.scale;
      out[first + i] = M::store(random[i] < rule.threshold ? 0 : kept);
    }
  });
}

template <class T, class Function>
void activate_backward(const T* x, const T* grad, T* grad_x, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  typename M::Acc slopes[kBlock] = {};
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
    for (int64_t i = 0; i < count; ++i) slopes[i] = M::load(x[first + i]);
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) slopes[i] = Function::slope(slopes[i]);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc passed = slopes[i] * rule.scale * M::load(grad[first + i]);
      grad_x[first + i] = M::store(random[i] < rule.threshold ? 0 : passed);
    }
  });
}

inline int64_t visible_keys(const SoftmaxShape& shape, int64_t b, int64_t q) {
  const int64_t length = shape.key_lengths[b];
  return shape.causal && q + 1 < length ? q + 1 : length;
}

// One row of softmax: probs of the first `visible` keys, zeros behind them.
template <class T>
void softmax_row(const T* scores, T* probs, int64_t visible, int64_t keys, float scale) {
  using M = Math<T>;
  using Acc = typename M::Acc;
  Acc top = M::load(scores[0]);
#pragma omp simd reduction(max : top)
  for (int64_t k = 1; k < visible; ++k) {
    const Acc s = M::load(scores[k]);
    top = s > top ? s : top;
  }
  Acc sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < visible; ++k) {
    sum += exponential((M::load(scores[k]) - top) * scale);
  }
  const Acc inverse = 1 / sum;
#pragma omp simd
  for (int64_t k = 0; k < visible; ++k) {
    probs[k] = M::store(exponential((M::load(scores[k]) - top) * scale) * inverse);
  }
  for (int64_t k = visible; k < keys; ++k) probs[k] = M::store(0);
}

template <class T>
void softmax(const T* scores, T* probs, T* dropped, SoftmaxShape shape, DropoutRule rule) {
  int64_t row = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t q = 0; q < shape.queries; ++q, ++row) {
        softmax_row(scores + row * shape.keys, probs + row * shape.keys, visible_keys(shape, b, q),
                    shape.keys, shape.scale);
      }
    }
  }
  if (dropped != nullptr) dropout(probs, dropped, row * shape.keys, rule);
}

template <class T>
void softmax_backward(const T* probs, const T* grad, T* grad_scores, SoftmaxShape shape,
                      DropoutRule rule) {
  using M = Math<T>;
  using Acc = typename M::Acc;
  const int64_t rows = shape.batch * shape.heads * shape.queries;
  // grad_scores first holds the gradient of the probabilities.
  const T* grad_probs = grad;
  if (rule.threshold != 0) {
    dropout(grad, grad_scores, rows * shape.keys, rule);
    grad_probs = grad_scores;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const T* p = probs + row * shape.keys;
    const T* g = grad_probs + row * shape.keys;
    T* out = grad_scores + row * shape.keys;
    Acc dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t k = 0; k < shape.keys; ++k) dot += M::load(p[k]) * M::load(g[k]);
#pragma omp simd
    for (int64_t k = 0; k < shape.keys; ++k) {
      out[k] = M::store(M::load(p[k]) * (M::load(g[k]) - dot) * shape.scale);
    }
  }
}

template <class T>
void cross_entropy(T* logits, const int64_t* labels, int64_t rows, int64_t columns,
                   double smoothing, bool with_gradient, float* scratch, double* sums) {
  using M = Math<T>;
  using Acc = typename M::Acc;
  const double uniform = smoothing / static_cast<double>(columns);
  for (int64_t row = 0; row < rows; ++row) {
    T* x = logits + row * columns;
    Acc top = M::load(x[0]);
    Acc total = 0;
#pragma omp simd reduction(max : top) reduction(+ : total)
    for (int64_t c = 0; c < columns; ++c) {
      const Acc value = M::load(x[c]);
      top = value > top ? value : top;
      total += value;
    }
    Acc sum = 0;
    // float rows keep their exponentials for the gradient; double computes them twice.
    if constexpr (sizeof(Acc) == sizeof(float)) {
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < columns; ++c) {
        scratch[c] = exponential(M::load(x[c]) - top);
        sum += scratch[c];
      }
    } else {
      for (int64_t c = 0; c < columns; ++c) sum += exponential(M::load(x[c]) - top);
    }
    const double log_norm = logarithm(static_cast<double>(sum)) + static_cast<double>(top);
    const double nll = log_norm - static_cast<double>(M::load(x[labels[row]]));
    const double mean_nll = log_norm * smoothing - uniform * static_cast<double>(total);
    sums[0] += (1 - smoothing) * nll + mean_nll;
    sums[1] += nll;
    if (!with_gradient) continue;
    const Acc inverse = 1 / sum;
    const Acc background = static_cast<Acc>(uniform);
    const Acc at_label = M::load(x[labels[row]]);
    if constexpr (sizeof(Acc) == sizeof(float)) {
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) {
        x[c] = M::store(scratch[c] * inverse - background);
      }
    } else {
      for (int64_t c = 0; c < columns; ++c) {
        x[c] = M::store(exponential(M::load(x[c]) - top) * inverse - background);
      }
    }
    x[labels[row]] = M::store(exponential(at_label - top) * inverse - background -
                              static_cast<Acc>(1 - smoothing));
  }
}

// Two registers of neighbouring elements, in an order that load and store agree on.
template <class Acc>
struct Pair {
  static constexpr int64_t kLanes = 2 * Register<Acc>::kLanes;
  RegisterOf<Acc> a, b;
};

template <class Acc>
inline void load(const Acc* from, Pair<Acc>& to) {
  __builtin_memcpy(&to.a, from, sizeof to.a);
  __builtin_memcpy(&to.b, from + Register<Acc>::kLanes, sizeof to.b);
}
template <class Acc>
inline void store(const Pair<Acc>& from, Acc* to) {
  __builtin_memcpy(to, &from.a, sizeof from.a);
  __builtin_memcpy(to + Register<Acc>::kLanes, &from.b, sizeof from.b);
}

// Of bfloat16 the elements with even numbers come first: so widening is one operation.
inline void load(const BFloat16Bits* from, Pair<float>& to) {
  RegisterOf<uint32_t> bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  const RegisterOf<uint32_t> even = bits << 16;
  const RegisterOf<uint32_t> odd = bits & 0xffff0000U;
  __builtin_memcpy(&to.a, &even, sizeof even);
  __builtin_memcpy(&to.b, &odd, sizeof odd);
}
inline void store(const Pair<float>& from, BFloat16Bits* to) {
  RegisterOf<uint32_t> even, odd;
  __builtin_memcpy(&even, &from.a, sizeof even);
  __builtin_memcpy(&odd, &from.b, sizeof odd);
  even = (even + 0x7fffU + ((even >> 16) & 1U)) >> 16;  // as Math's store rounds
  odd = (odd + 0x7fffU + ((odd >> 16) & 1U)) & 0xffff0000U;
  const RegisterOf<uint32_t> bits = even | odd;
  __builtin_memcpy(to, &bits, sizeof bits);
}

// A query of `width` elements in the order of `load`, what fills no pair behind it.
template <class T>
inline void widen(const T* query, int64_t width, typename Math<T>::Acc* wide) {
  using P = Pair<typename Math<T>::Acc>;
  int64_t j = 0;
  for (; j + P::kLanes <= width; j += P::kLanes) {
    P pair;
    load(query + j, pair);
    store(pair, wide + j);
  }
  for (; j < width; ++j) wide[j] = Math<T>::load(query[j]);
}

template <class T>
inline typename Math<T>::Acc dot(const typename Math<T>::Acc* wide_query, const T* key,
                                 int64_t width) {
  using Acc = typename Math<T>::Acc;
  Pair<Acc> sums = {};
  int64_t j = 0;
  for (; j + Pair<Acc>::kLanes <= width; j += Pair<Acc>::kLanes) {
    Pair<Acc> q, k;  // NOLINT(cppcoreguidelines-pro-type-member-init): load fills them.
    load(wide_query + j, q);
    load(key + j, k);
    sums.a += q.a * k.a;
    sums.b += q.b * k.b;
  }
  Acc sum = sum_of<Acc>(sums.a + sums.b);
  for (; j < width; ++j) sum += wide_query[j] * Math<T>::load(key[j]);
  return sum;
}

// scores = softmax(scale * scores), of whole registers.
template <class Acc>
inline void softmax_of_registers(Acc* scores, int64_t size, float scale) {
  RegisterOf<Acc> lanes, tops, sums = {};
  __builtin_memcpy(&tops, scores, sizeof tops);
  for (int64_t i = Register<Acc>::kLanes; i < size; i += Register<Acc>::kLanes) {
    __builtin_memcpy(&lanes, scores + i, sizeof lanes);
    tops = lanes > tops ? lanes : tops;
  }
  const Acc top = greatest_of<Acc>(tops);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) scores[i] = exponential((scores[i] - top) * scale);
  for (int64_t i = 0; i < size; i += Register<Acc>::kLanes) {
    __builtin_memcpy(&lanes, scores + i, sizeof lanes);
    sums += lanes;
  }
  const Acc inverse = 1 / sum_of<Acc>(sums);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) scores[i] *= inverse;
}

// The rows' mean by `weights`, for kPairs pairs of registers from element `first` on.
template <int kPairs, class T>
inline void weighted_mean(const typename Math<T>::Acc* weights, const T* const* rows, int64_t first,
                          int64_t count, T* out) {
  using P = Pair<typename Math<T>::Acc>;
  P sums[kPairs] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int p = 0; p < kPairs; ++p) {
      P value;
      load(rows[i] + first + p * P::kLanes, value);
      sums[p].a += weights[i] * value.a;
      sums[p].b += weights[i] * value.b;
    }
  }
  for (int p = 0; p < kPairs; ++p) store(sums[p], out + p * P::kLanes);
}

template <class T>
void attend(const T* query, const T* const* rows, int64_t count, HeadShape shape,
            typename Math<T>::Acc* scratch, T* out) {
  using M = Math<T>;
  using Acc = typename M::Acc;
  constexpr int64_t kLanes = Pair<Acc>::kLanes;
  const int64_t width = shape.heads * shape.width;
  const int64_t size = (count + kScoresUnit - 1) / kScoresUnit * kScoresUnit;
  Acc* scores = scratch + width;  // [heads, size]; those behind `count` come to nothing
  for (int64_t h = 0; h < shape.heads; ++h) {
    widen(query + h * shape.width, shape.width, scratch + h * shape.width);
    for (int64_t i = count; i < size; ++i) scores[h * size + i] = -__builtin_inff();
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      scores[h * size + i] = dot(scratch + h * shape.width, rows[i] + h * shape.width, shape.width);
    }
  }
  for (int64_t h = 0; h < shape.heads; ++h) {
    Acc* weights = scores + h * size;
    softmax_of_registers(weights, size, shape.scale);
    int64_t j = h * shape.width;
    const int64_t end = j + shape.width;
    for (; j + 2 * kLanes <= end; j += 2 * kLanes)
      weighted_mean<2>(weights, rows, width + j, count, out + j);
    for (; j + kLanes <= end; j += kLanes)
      weighted_mean<1>(weights, rows, width + j, count, out + j);
    for (; j < end; ++j) {
      Acc sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += weights[i] * M::load(rows[i][width + j]);
      out[j] = M::store(sum);
    }
  }
}

template <class T>
double log_sum_exp(const T* row, int64_t columns, bool with_sum, typename Math<T>::Acc* tops) {
  using M = Math<T>;
  using Acc = typename M::Acc;
  Acc top = M::load(row[0]);
  // Infinity downwards leaves no trace in sums and tops. Its product with 0 is NaN.
  Acc sum = 0;
  for (int64_t first = 0; first < columns; first += kTopColumns) {
    const int64_t end = first + kTopColumns < columns ? first + kTopColumns : columns;
    Acc highest = M::load(row[first]);
#pragma omp simd reduction(max : highest) reduction(+ : sum)
    for (int64_t c = first; c < end; ++c) {
      const Acc value = M::load(row[c]);
      highest = value > highest ? value : highest;
      sum += value * 0;
    }
    tops[first / kTopColumns] = highest;
    top = highest > top ? highest : top;
  }
  if (!with_sum) return static_cast<double>(sum);
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < columns; ++c) sum += exponential(M::load(row[c]) - top);
  return logarithm(static_cast<double>(sum)) + static_cast<double>(top);
}

float quantize(const float* x, int64_t n, int8_t* out) {
  uint32_t top = 0;  // The bits of magnitudes have their order, with NaN above infinity.
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x[i]) & 0x7fffffffU;
    top = bits > top ? bits : top;
  }
  const float greatest = __builtin_bit_cast(float, top);
  constexpr float kLeast = 1e-36F;  // 127 / this is finite
  if (top >= 0x7f800000U || greatest < kLeast) {
    for (int64_t i = 0; i < n; ++i) out[i] = 0;
    return top >= 0x7f800000U ? __builtin_nanf("") : 0;
  }
  const float factor = 127 / greatest;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(__builtin_rintf(x[i] * factor));
  return greatest / 127;
}

#if defined(__AVX2__)
// A product of numbers in [-127, 127] is that of one's magnitude and the other with its sign. Two such
// products fit into 16 bits together, which those of unsigned numbers up to 255 do not.
template <int kRows>
inline void product_of_rows(const int8_t* rows, int64_t depth, const int8_t* block, int32_t* sums) {
  constexpr int kHalves = 2;
  constexpr int64_t kSums = 8;  // of a register, four products each
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t first = 0; first < kInt8Columns; first += kHalves * kSums) {
    __m256i totals[kRows][kHalves] = {};
    for (int64_t k = 0; k < depth; k += 4) {
      __m256i w[kHalves], magnitudes[kHalves];
      for (int half = 0; half < kHalves; ++half) {
        __builtin_memcpy(&w[half], block + k * kInt8Columns + (first + half * kSums) * 4,
                         sizeof w[half]);
        magnitudes[half] = _mm256_abs_epi8(w[half]);
      }
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, rows + r * depth + k, sizeof four);
        const __m256i x = _mm256_set1_epi32(four);
        for (int half = 0; half < kHalves; ++half) {
          const __m256i pairs =
              _mm256_maddubs_epi16(magnitudes[half], _mm256_sign_epi8(x, w[half]));
          totals[r][half] = _mm256_add_epi32(totals[r][half], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      __builtin_memcpy(sums + r * kInt8Columns + first, totals[r], sizeof totals[r]);
  }
}
#else
template <int kRows>
inline void product_of_rows(const int8_t* rows, int64_t depth, const int8_t* block, int32_t* sums) {
  for (int r = 0; r < kRows; ++r) {
    int32_t totals[kInt8Columns] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const int32_t x = rows[r * depth + k];
      const int8_t* column = block + k / 4 * 4 * kInt8Columns + k % 4;
      for (int64_t c = 0; c < kInt8Columns; ++c) totals[c] += x * column[4 * c];
    }
    __builtin_memcpy(sums + r * kInt8Columns, totals, sizeof totals);
  }
}
#endif

void product(const int8_t* rows, int64_t num_rows, int64_t depth, const int8_t* block,
             int32_t* sums) {
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4)
    product_of_rows<4>(rows + r * depth, depth, block, sums + r * kInt8Columns);
  for (; r < num_rows; ++r)
    product_of_rows<1>(rows + r * depth, depth, block, sums + r * kInt8Columns);
}

template <bool kOffsets>
inline void scale_row(const Int8Tile& tile, const int32_t* sums, float row_scale, float* out) {
  const auto sum = [&](int64_t c) {
    if constexpr (kOffsets) return static_cast<float>(sums[c] - tile.offsets[c]);
    return static_cast<float>(sums[c]);
  };
  if (tile.bias == nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < tile.columns; ++c) out[c] = sum(c) * (row_scale * tile.scales[c]);
  } else {
    // Fused, whether the instruction set has that or not: so all tables round alike.
#pragma omp simd
    for (int64_t c = 0; c < tile.columns; ++c)
      out[c] = __builtin_fmaf(sum(c), row_scale * tile.scales[c], tile.bias[c]);
  }
}

void scale(const Int8Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* out = tile.out + r * tile.out_stride;
    (tile.offsets ? scale_row<true> : scale_row<false>)(tile, tile.sums + r * kInt8Columns,
                                                        tile.row_scales[r], out);
    if (tile.tops == nullptr) continue;
    float top = out[0];
#pragma omp simd reduction(max : top)
    for (int64_t c = 0; c < tile.columns; ++c) top = out[c] > top ? out[c] : top;
    if (tile.sums_of_exp == nullptr) {
      // The maximum drops NaN and -infinity, which a product of scales that overflows can leave in a
      // single column. Their product with 0 is NaN, that of every other number 0.
      float zero = 0;
#pragma omp simd reduction(+ : zero)
      for (int64_t c = 0; c < tile.columns; ++c) zero += out[c] * 0;
      tile.tops[r * tile.tops_stride] = top + zero;
      continue;
    }
    tile.tops[r * tile.tops_stride] = top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < tile.columns; ++c) sum += exponential(out[c] - top) + out[c] * 0;
    tile.sums_of_exp[r * tile.tops_stride] = sum;
  }
}

double log_sum(const float* tops, const float* sums, int64_t n) {
  float top = tops[0];
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = tops[i] > top ? tops[i] : top;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += sums[i] * exponential(tops[i] - top);
  return logarithm(static_cast<double>(sum)) + static_cast<double>(top);
}

template <class T>
typename Math<T>::Acc sum_of_exp(const T* x, int64_t n, typename Math<T>::Acc top,
                                 typename Math<T>::Acc factor) {
  typename Math<T>::Acc sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exponential((Math<T>::load(x[i]) - top) * factor);
  return sum;
}

template <class T>
constexpr LoopsOf<T> table() {
  using Sum = typename SumOf<T>::Type;
  return {dropout<T, T>,
          dropout<Sum, T>,
          add_dropout<T>,
          relu_dropout<T>,
          relu_dropout_backward<T>,
          bias_relu_dropout<T>,
          bias_relu_dropout_backward<T>,
          {norm<T, T>, norm_backward<T, T>},
          {norm<T, Sum>, norm_backward<T, Sum>},
          {activate<T, Gelu>, activate_backward<T, Gelu>},
          {activate<T, Swish>, activate_backward<T, Swish>},
          softmax<T>,
          softmax_backward<T>,
          {attention_scratch<T>, attention_forward<T>, attention_backward<T>},
          cross_entropy<T>,
          attend<T>,
          log_sum_exp<T>,
          sum_of_exp<T>};
}

#if defined(__AVX512BF16__)
constexpr PanelLoops kPanelLoops{pack_panels<true>, pack_panels<false>, multiply_panels};
#else
constexpr PanelLoops kPanelLoops{};
#endif

}  // namespace

#define COHORT_STRING_OF(x) #x
#define COHORT_NAME(x) COHORT_STRING_OF(x)
extern const Loops COHORT_LOOPS;
const Loops COHORT_LOOPS = {COHORT_NAME(COHORT_LOOPS),
                            table<float>(),
                            table<double>(),
                            table<BFloat16Bits>(),
                            packed_product,
                            kPanelLoops,
                            {quantize, product, scale, log_sum}};

}  // namespace cohort::nmt
