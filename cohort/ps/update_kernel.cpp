// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set, with COHORT_KERNELS naming the function that it defines.
// Includes nothing with inline functions that other files share: the linker might keep the wrong
// copy.
#include "cohort/ps/update_kernel.h"

namespace cohort::ps {
namespace {

// Sums have so many lanes whatever the instruction set: lane j takes elements j, j + kLanes ...
constexpr int64_t kLanes = 16;

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
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) {
        const double x = clamped(i + j);
        lanes[j] += x * x;
      }
    }
    for (int64_t j = 0; i + j < width; ++j) {
      const double x = clamped(i + j);
      lanes[j] += x * x;
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
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

}  // namespace

void COHORT_KERNELS(const RuleConstants& rule, int64_t width, float* __restrict w,
                    float* __restrict state, const float* __restrict gradient) {
  Gradient g{gradient, rule.clip_value};
  double squares = 0;
  if (rule.clip_norm > 0 || rule.rule == Rule::kRowwiseAdagrad) {
    squares = g.sum_of_squares(width);
    const double norm = __builtin_sqrt(squares);
    const auto bound = static_cast<double>(rule.clip_norm);
    if (bound > 0 && norm > bound) {
      g.factor = static_cast<float>(bound / norm);
      squares = bound * bound;
    }
  }
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
    case Rule::kRowwiseAdagrad: {
      state[0] += static_cast<float>(squares / static_cast<double>(width));
      const float rate = rule.rate / (__builtin_sqrtf(state[0]) + rule.eps);
      for (int64_t i = 0; i < width; ++i) w[i] -= rate * g[i];
      break;
    }
    case Rule::kAdam:
      adam(rule, width, w, state, g);
      break;
    case Rule::kFtrl:
      ftrl(rule, width, w, state, g);
      break;
  }
}

}  // namespace cohort::ps
