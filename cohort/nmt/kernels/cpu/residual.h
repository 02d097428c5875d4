// SPDX-License-Identifier: Apache-2.0
// Dropout, what it is added to, and the norm of that. Of loops.cpp alone, as arithmetic.h.
#pragma once
#include "cohort/nmt/kernels/cpu/arithmetic.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

constexpr int64_t kBlock = 512;

// Four 16-bit random numbers from each hashed counter (finalizer of splitmix64): those of the
// elements from rule.first + first on.
inline void random_block(const DropoutRule& rule, int64_t first, uint16_t* out) {
  constexpr int64_t kWords = kBlock / 4;
  const int64_t begin = rule.first + first;
  const int64_t skipped = begin % 4;
  uint64_t words[kWords + 1];
#pragma omp simd
  for (int64_t w = 0; w < kWords; ++w) words[w] = random_word(rule.key, begin / 4 + w);
  if (skipped != 0) words[kWords] = random_word(rule.key, begin / 4 + kWords);
  __builtin_memcpy(out, reinterpret_cast<const uint16_t*>(words) + skipped,
                   kBlock * sizeof(uint16_t));
}

// The same of `count` elements, at most kBlock.
inline void random_numbers(const DropoutRule& rule, int64_t first, int64_t count, uint16_t* out) {
  if (count == kBlock) return random_block(rule, first, out);
  const int64_t begin = rule.first + first;
  const int64_t skipped = begin % 4;
  const int64_t needed = (skipped + count + 3) / 4;
  uint64_t words[kBlock / 4 + 1];
#pragma omp simd
  for (int64_t w = 0; w < needed; ++w) words[w] = random_word(rule.key, begin / 4 + w);
  __builtin_memcpy(out, reinterpret_cast<const uint16_t*>(words) + skipped,
                   static_cast<uint64_t>(count) * sizeof(uint16_t));
}

// Calls body(first, count, random) for `n` elements, at most kBlock at a time: random[i] is the random
// number of the element first + i, 0 if nothing is dropped. Inlined, so that the loops of a body are
// vectorised as if they stood in its caller.
template <class Body>
__attribute__((always_inline)) inline void for_blocks(int64_t n, const DropoutRule& rule,
                                                      const Body& body) {
  uint16_t random[kBlock] = {};
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    if (rule.threshold != 0) random_numbers(rule, first, count, random);
    body(first, count, random);
  }
}

template <class T, class Out>
void dropout(const T* x, Out* out, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc kept = M::load(x[first + i]) * rule.scale;
      out[first + i] = Math<Out>::store(random[i] < rule.threshold ? 0 : kept);
    }
  });
}

template <class Y>
void add_dropout(const typename SumOf<Y>::Type* x, const Y* y, typename SumOf<Y>::Type* out,
                 int64_t n, DropoutRule rule) {
  using M = Math<Y>;
  for_blocks(n, rule, [&](int64_t first, int64_t count, const uint16_t* random) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc kept = M::load(y[first + i]) * rule.scale;
      const Y dropped = M::store(random[i] < rule.threshold ? 0 : kept);
      out[first + i] = x[first + i] + M::load(dropped);
    }
  });
}

// The sum of term(x) over a row, in an order that `n` alone decides.
template <class Acc, class Term>
inline Acc sum_over(const Acc* row, int64_t n, Term term) {
  constexpr int64_t kLanes = Register<Acc>::kLanes;
  RegisterOf<Acc> sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const RegisterOf<Acc> lanes = anywhere(row + i);
    sums += term(lanes);
  }
  Acc sum = sum_of<Acc>(sums);
  for (; i < n; ++i) sum += term(row[i]);
  return sum;
}

template <class Acc>
inline Acc inverse_root(Acc x) {
  if constexpr (sizeof(Acc) == sizeof(float)) {
    return 1 / __builtin_sqrtf(x);
  } else {
    return 1 / __builtin_sqrt(x);
  }
}

template <class Y, class Out>
void norm(const typename SumOf<Y>::Type* x, const Y* y, DropoutRule rule,
          NormWeights<typename SumOf<Y>::Type> of, typename SumOf<Y>::Type* sum, Out* out,
          typename SumOf<Y>::Type* stats) {
  using Acc = typename SumOf<Y>::Type;
  const int64_t n = of.width;
  if (y != nullptr) {
    add_dropout(x, y, sum, n, rule);
    x = sum;
  }
  const auto width = static_cast<Acc>(n);
  const Acc mean = sum_over(x, n, [](const auto& value) { return value; }) / width;
  const Acc variance = sum_over(x, n,
                                [mean](const auto& value) {
                                  const auto deviation = value - mean;
                                  return deviation * deviation;
                                }) /
                       width;
  const Acc inverse = inverse_root(variance + static_cast<Acc>(kNormEpsilon));
  stats[0] = mean;
  stats[1] = inverse;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i)
    out[i] = Math<Out>::store((x[i] - mean) * inverse * of.weight[i] + of.bias[i]);
}

inline void load_lanes(const float* from, RegisterOf<float>& to) {
  to = anywhere(from);
}
inline void load_lanes(const double* from, RegisterOf<double>& to) {
  to = anywhere(from);
}
inline void load_lanes(const BFloat16Bits* from, RegisterOf<float>& to) {
  Register<uint16_t, kRegisterBytes / 2>::Type bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  const RegisterOf<uint32_t> wide = __builtin_convertvector(bits, RegisterOf<uint32_t>) << 16;
  __builtin_memcpy(&to, &wide, sizeof to);
}

// With normal = (sum - mean) * inverse and slope = grad_out * weight the gradient of the sum by its
// norm is inverse * (slope - mean of slope - normal * mean of slope * normal).
template <class Y, class Out>
void norm_backward(const typename SumOf<Y>::Type* sum, const typename SumOf<Y>::Type* stats,
                   NormWeights<typename SumOf<Y>::Type> of, const typename SumOf<Y>::Type* grad_sum,
                   const Out* grad_out, DropoutRule rule, typename SumOf<Y>::Type* grad_x,
                   Y* grad_y, typename SumOf<Y>::Type* grad_weight,
                   typename SumOf<Y>::Type* grad_bias) {
  using Acc = typename SumOf<Y>::Type;
  constexpr int64_t kLanes = Register<Acc>::kLanes;
  const int64_t n = of.width;
  const Acc mean = stats[0], inverse = stats[1];
  RegisterOf<Acc> slopes = {}, dots = {};
  int64_t first = 0;
  for (; first + kLanes <= n; first += kLanes) {
    RegisterOf<Acc> grad;
    load_lanes(grad_out + first, grad);
    const RegisterOf<Acc> normal = (anywhere(sum + first) - mean) * inverse;
    const RegisterOf<Acc> slope = grad * anywhere(of.weight + first);
    slopes += slope;
    dots += slope * normal;
    anywhere(grad_weight + first) += grad * normal;
    anywhere(grad_bias + first) += grad;
  }
  Acc mean_slope = sum_of<Acc>(slopes), mean_dot = sum_of<Acc>(dots);
  for (; first < n; ++first) {
    const Acc grad = Math<Out>::load(grad_out[first]);
    const Acc normal = (sum[first] - mean) * inverse;
    const Acc slope = grad * of.weight[first];
    mean_slope += slope;
    mean_dot += slope * normal;
    grad_weight[first] += grad * normal;
    grad_bias[first] += grad;
  }
  mean_slope /= static_cast<Acc>(n);
  mean_dot /= static_cast<Acc>(n);
  const auto gradient = [&](int64_t i) {
    const Acc normal = (sum[i] - mean) * inverse;
    return inverse * (Math<Out>::load(grad_out[i]) * of.weight[i] - mean_slope - normal * mean_dot);
  };
  if (grad_sum != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) grad_x[i] = grad_sum[i] + gradient(i);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) grad_x[i] = gradient(i);
  }
  if (grad_y != nullptr) dropout(grad_x, grad_y, n, rule);
}

}  // namespace
}  // namespace cohort::nmt
