// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set, with COHORT_KERNELS naming the function that it defines.
// Includes nothing with inline functions that other files share: the linker might keep the wrong
// copy.
#include "cohort/ps/update_kernel.h"

namespace cohort::ps {
namespace {

// Sums have so many lanes whatever the instruction set: lane j takes elements j, j + kLanes ...
constexpr int64_t kLanes = 16;

using Floats [[gnu::vector_size(32)]] = float;
using Doubles [[gnu::vector_size(64)]] = double;

// Element i of the gradient as the rule sees it.
struct Gradient {
  const float* values = nullptr;
  float limit = 0;
  float factor = 1;

  [[gnu::always_inline]] float clamped(int64_t i) const {
    const float x = values[i];
    const float above = x < -limit ? -limit : x;  // A NaN passes.
    return above > limit ? limit : above;
  }
  [[gnu::always_inline]] float operator[](int64_t i) const { return clamped(i) * factor; }

  double sum_of_squares(int64_t width) const {
    // In registers: the lanes of an array would go through memory each time that they are halved.
    Doubles low{}, high{};
    const Floats most = Floats{} + limit, least = -most;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      Floats x, y;
      __builtin_memcpy(&x, values + i, sizeof(x));
      __builtin_memcpy(&y, values + i + kLanes / 2, sizeof(y));
      x = x < least ? least : x;
      y = y < least ? least : y;
      x = x > most ? most : x;
      y = y > most ? most : y;
      const Doubles a = __builtin_convertvector(x, Doubles);
      const Doubles b = __builtin_convertvector(y, Doubles);
      low += a * a;
      high += b * b;
    }
    if (i < width) {
      double lanes[kLanes];
      __builtin_memcpy(lanes, &low, sizeof(low));
      __builtin_memcpy(lanes + kLanes / 2, &high, sizeof(high));
      for (int64_t j = 0; i + j < width; ++j) {
        const double x = clamped(i + j);
        lanes[j] += x * x;
      }
      __builtin_memcpy(&low, lanes, sizeof(low));
      __builtin_memcpy(&high, lanes + kLanes / 2, sizeof(high));
    }
    low += high;
    const auto fours = __builtin_shufflevector(low, low, 0, 1, 2, 3) +
                       __builtin_shufflevector(low, low, 4, 5, 6, 7);
    const auto twos =
        __builtin_shufflevector(fours, fours, 0, 1) + __builtin_shufflevector(fours, fours, 2, 3);
    return twos[0] + twos[1];
  }

  // Clips by the norm; returns the sum of squares afterwards.
  double clip_norm(float norm_limit, int64_t width) {
    const double squares = sum_of_squares(width);
    const auto bound = static_cast<double>(norm_limit);
    if (bound <= 0) return squares;
    const double norm = __builtin_sqrt(squares);
    if (!(norm > bound)) return squares;
    factor = static_cast<float>(bound / norm);
    return bound * bound;
  }
};

void adam(const RuleConstants& rule, int64_t width, float* __restrict w, float* __restrict state,
          const Gradient& g) {
  state[0] += 1;  // Stays at 2^24, where both corrections have long been 1.
  const auto count = static_cast<int64_t>(state[0]);
  const double correction1 = 1 - power(static_cast<double>(rule.beta1), count);
  const double correction2 = 1 - power(static_cast<double>(rule.beta2), count);
  const auto rate = static_cast<float>(static_cast<double>(rule.rate) / correction1);
  const auto root = static_cast<float>(__builtin_sqrt(correction2));
  float* __restrict m = state + 1;
  float* __restrict v = state + 1 + width;
  for (int64_t i = 0; i < width; ++i) {
    const float x = g[i];
    m[i] = rule.beta1 * m[i] + (1 - rule.beta1) * x;
    v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * (x * x);
    w[i] -= rate * m[i] / (__builtin_sqrtf(v[i]) / root + rule.eps);
  }
}

void ftrl(const RuleConstants& rule, int64_t width, float* __restrict w, float* __restrict state,
          const Gradient& g) {
  float* __restrict z = state;
  float* __restrict n = state + width;
  for (int64_t i = 0; i < width; ++i) {
    const float x = g[i];
    const float before = __builtin_sqrtf(n[i]);
    n[i] += x * x;
    const float after = __builtin_sqrtf(n[i]);
    z[i] += x - (after - before) / rule.rate * w[i];
    const float shrunk = __builtin_copysignf(rule.l1, z[i]) - z[i];
    const float weight = shrunk / ((rule.eps + after) / rule.rate + rule.l2);
    w[i] = __builtin_fabsf(z[i]) <= rule.l1 ? 0.0F : weight;
  }
}

// The default of tables: by itself, so that it does not save the registers that the others need.
[[gnu::noinline]] void rowwise_adagrad(const RuleConstants& rule, int64_t width,
                                       float* __restrict w, float* __restrict state,
                                       const float* __restrict gradient) {
  Gradient g{gradient, rule.clip_value};
  const double squares = g.clip_norm(rule.clip_norm, width);
  state[0] += static_cast<float>(squares / static_cast<double>(width));
  const float rate = rule.rate / (__builtin_sqrtf(state[0]) + rule.eps);
  for (int64_t i = 0; i < width; ++i) w[i] -= rate * g[i];
}

}  // namespace

void COHORT_KERNELS(const RuleConstants& rule, int64_t width, float* __restrict w,
                    float* __restrict state, const float* __restrict gradient) {
  if (rule.rule == Rule::kRowwiseAdagrad) return rowwise_adagrad(rule, width, w, state, gradient);
  Gradient g{gradient, rule.clip_value};
  if (rule.clip_norm > 0) g.clip_norm(rule.clip_norm, width);
  switch (rule.rule) {
    case Rule::kAdd:
      for (int64_t i = 0; i < width; ++i) w[i] += g[i];
      break;
    case Rule::kSgd:
      for (int64_t i = 0; i < width; ++i) w[i] -= rule.rate * g[i];
      break;
    case Rule::kMomentum:
      for (int64_t i = 0; i < width; ++i) {
        state[i] = rule.momentum * state[i] + g[i];
        w[i] -= rule.rate * state[i];
      }
      break;
    case Rule::kAdagrad:
      for (int64_t i = 0; i < width; ++i) {
        const float x = g[i];
        state[i] += x * x;
        w[i] -= rule.rate * x / (__builtin_sqrtf(state[i]) + rule.eps);
      }
      break;
    case Rule::kRowwiseAdagrad:
      break;  // Above.
    case Rule::kAdam:
      adam(rule, width, w, state, g);
      break;
    case Rule::kFtrl:
      ftrl(rule, width, w, state, g);
      break;
  }
}

}  // namespace cohort::ps
