// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels compute, in functions that the host's compiler takes, too, so that the
// CPU's tests hold for them. A thread block is a class Lanes: a kernel's, or a loop over its
// threads. Knows neither libtorch nor CUDA's headers. Legend as in fused.h.
#pragma once
#include <cmath>
#include <cstdint>

#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/kernels/cuda/launches.h"

#ifdef __CUDACC__
#define COHORT_DEVICE __device__
#else
#define COHORT_DEVICE
#endif

namespace cohort::nmt {

/// Threads of a block that computes a row of cross-entropy, and of those that compute a row of
/// softmax. They decide the order of the row's sums.
inline constexpr int kLanes = 256;
inline constexpr int kSoftmaxLanes = 32;

COHORT_DEVICE inline float wide(float x) {
  return x;
}
COHORT_DEVICE inline double wide(double x) {
  return x;
}
COHORT_DEVICE inline float wide(BFloat16Bits x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

COHORT_DEVICE inline void store(float x, float& to) {
  to = x;
}
COHORT_DEVICE inline void store(double x, double& to) {
  to = x;
}
/// Rounds to nearest even. A NaN stays one: what the card's arithmetic makes, 0x7fffffff, must not
/// be rounded, which would carry into the sign.
COHORT_DEVICE inline void store(float x, BFloat16Bits& to) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  to.bits = static_cast<uint16_t>(x == x ? (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16 : 0x7fc0U);
}

COHORT_DEVICE inline float exponential(float x) {
  return ::expf(x);
}
COHORT_DEVICE inline double exponential(double x) {
  return ::exp(x);
}

/// The random numbers of loops.h's DropoutRule. Four neighbours share a hash: ask in order.
class DropoutBits {
 public:
  COHORT_DEVICE explicit DropoutBits(uint64_t key) : key_(key) {}
  /// Returns the 16 bits of element `number` >= 0.
  COHORT_DEVICE uint32_t of(int64_t number) {
    if (number / 4 != word_) {
      word_ = number / 4;
      uint64_t z = key_ + static_cast<uint64_t>(word_) * 0x9e3779b97f4a7c15ULL;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
      bits_ = z ^ (z >> 31);
    }
    return static_cast<uint32_t>(bits_ >> (number % 4 * 16)) & 0xffffU;
  }

 private:
  uint64_t key_;
  int64_t word_ = -1;
  uint64_t bits_ = 0;
};

/// A NumberedRule for elements that are asked for in order.
class Dropper {
 public:
  COHORT_DEVICE explicit Dropper(const NumberedRule& numbered)
      : numbered_(numbered),
        whole_(numbered.part_size == numbered.part_whole),
        bits_(numbered.rule.key) {}
  /// Returns what the rule leaves of `value`, element i.
  template <class Value>
  COHORT_DEVICE Value operator()(Value value, int64_t i) {
    const auto& [rule, size, all] = numbered_;
    value *= rule.scale;
    const int64_t number = rule.first + (whole_ ? i : i / size * all + i % size);
    return rule.threshold != 0 && bits_.of(number) < rule.threshold ? 0 : value;
  }

 private:
  const NumberedRule& numbered_;
  const bool whole_;
  DropoutBits bits_;
};

/// Elements of a thread that works element by element: a hash serves four.
inline constexpr int kElements = 4;

/// Computes `count` <= kElements elements of a DropLaunch, from number `first` on.
template <class In, class Out>
COHORT_DEVICE inline void drop_elements(const DropLaunch& launch, const In* in, const Out* added,
                                        Out* out, int64_t first, int count) {
  Dropper drop(launch.dropout);
  for (int i = 0; i < kElements; ++i) {
    if (i >= count) break;
    auto value = wide(in[i]);
    if (launch.relu) value = value <= 0 ? 0 : value;
    const auto left = drop(value, first + i);
    if (added == nullptr) {
      store(left, out[i]);
    } else {
      In rounded;
      store(left, rounded);
      store(wide(added[i]) + wide(rounded), out[i]);
    }
  }
}

/// Computes `count` <= kElements elements of a ReluBackwardLaunch.
template <class T>
COHORT_DEVICE inline void relu_backward_elements(const ReluBackwardLaunch& launch, const T* out,
                                                 const T* grad, T* to, int count) {
  for (int i = 0; i < kElements; ++i) {
    if (i >= count) break;
    auto slope = wide(grad[i]) * launch.scale;
    if (!(wide(out[i]) > 0)) slope = 0;
    store(slope, to[i]);
  }
}

/// Computes a row of a SoftmaxLaunch by `lanes`, as cross_entropy_row.
template <class T, class Lanes>
COHORT_DEVICE inline void softmax_row(const Lanes& lanes, const SoftmaxLaunch& launch,
                                      int64_t row) {
  using Sum = typename SumOf<T>::Type;
  const SoftmaxShape& shape = launch.shape;
  const int64_t keys = shape.keys, query = row % shape.queries;
  const int64_t length = shape.key_lengths[row / shape.queries / shape.heads];
  int64_t visible = length < keys ? length : keys;
  if (shape.causal && query + 1 < visible) visible = query + 1;
  const T* scores = static_cast<const T*>(launch.scores) + row * keys;
  T* probs = static_cast<T*>(launch.probs) + row * keys;
  T* dropped = launch.dropped == nullptr ? nullptr : static_cast<T*>(launch.dropped) + row * keys;
  const Sum scale = shape.scale;
  const Sum top = lanes.reduce(
      [=](int lane) {
        Sum part = -INFINITY;
        for (int64_t k = lane; k < visible; k += kSoftmaxLanes) {
          const Sum x = wide(scores[k]) * scale;
          part = x > part || x != x ? x : part;
        }
        return part;
      },
      [](Sum a, Sum b) { return b > a || b != b ? b : a; });
  const Sum sum = lanes.reduce(
      [=](int lane) {
        Sum part = 0;
        for (int64_t k = lane; k < visible; k += kSoftmaxLanes)
          part += exponential(wide(scores[k]) * scale - top);
        return part;
      },
      [](Sum a, Sum b) { return a + b; });
  lanes.for_each([=](int lane) {
    Dropper drop(launch.dropout);
    for (int64_t k = lane; k < keys; k += kSoftmaxLanes) {
      const Sum shown = k < visible ? exponential(wide(scores[k]) * scale - top) : 0;
      store(shown / sum, probs[k]);
      if (dropped != nullptr) store(drop(wide(probs[k]), row * keys + k), dropped[k]);
    }
  });
}

/// Computes a row of a SoftmaxBackwardLaunch by `lanes`, as softmax_row.
template <class T, class Lanes>
COHORT_DEVICE inline void softmax_backward_row(const Lanes& lanes,
                                               const SoftmaxBackwardLaunch& launch, int64_t row) {
  using Sum = typename SumOf<T>::Type;
  const int64_t keys = launch.keys, first = row * keys;
  const T* probs = static_cast<const T*>(launch.probs) + first;
  const T* grad = static_cast<const T*>(launch.grad) + first;
  T* to = static_cast<T*>(launch.to) + first;
  const Sum dot = lanes.reduce(
      [=](int lane) {
        Dropper drop(launch.dropout);
        Sum part = 0;
        for (int64_t k = lane; k < keys; k += kSoftmaxLanes)
          part += wide(probs[k]) * drop(wide(grad[k]), first + k);
        return part;
      },
      [](Sum a, Sum b) { return a + b; });
  lanes.for_each([=](int lane) {
    Dropper drop(launch.dropout);
    for (int64_t k = lane; k < keys; k += kSoftmaxLanes)
      store(wide(probs[k]) * (drop(wide(grad[k]), first + k) - dot) * launch.scale, to[k]);
  });
}

/// The greatest of some numbers and their sum.
template <class Sum>
struct TopAndTotal {
  Sum top, total;
};

/// Computes row n of a CrossEntropyLaunch by `lanes`, which has
///   reduce(part, join): join of part(lane) over the lanes, in a tree that is always the same;
///   for_each(part):     part(lane) on every lane, once all have ended what stands before.
template <class T, class Lanes>
COHORT_DEVICE inline void cross_entropy_row(const Lanes& lanes, const CrossEntropyLaunch& launch,
                                            int64_t n) {
  using Sum = typename SumOf<T>::Type;
  const int64_t columns = launch.columns, label = launch.labels_N[n];
  T* row = static_cast<T*>(launch.logits_NV) + n * columns;
  const TopAndTotal<Sum> all = lanes.reduce(
      [=](int lane) {
        TopAndTotal<Sum> part{wide(row[0]), 0};
        for (int64_t c = lane; c < columns; c += kLanes) {
          const Sum x = wide(row[c]);
          part.top = x > part.top ? x : part.top;
          part.total += x;
        }
        return part;
      },
      [](const TopAndTotal<Sum>& a, const TopAndTotal<Sum>& b) {
        return TopAndTotal<Sum>{a.top > b.top ? a.top : b.top, a.total + b.total};
      });
  const Sum top = all.top;
  const Sum sum = lanes.reduce(
      [=](int lane) {
        Sum part = 0;
        for (int64_t c = lane; c < columns; c += kLanes) part += exponential(wide(row[c]) - top);
        return part;
      },
      [](Sum a, Sum b) { return a + b; });
  const double uniform = launch.smoothing / static_cast<double>(columns);
  if (lanes.first()) {
    const bool known = label >= 0 && label < columns;
    const double log_norm = ::log(static_cast<double>(sum)) + static_cast<double>(top);
    const double nll = known ? log_norm - static_cast<double>(wide(row[label])) : ::nan("");
    launch.losses_N2[2 * n] = (1 - launch.smoothing) * nll + log_norm * launch.smoothing -
                              uniform * static_cast<double>(all.total);
    launch.losses_N2[2 * n + 1] = nll;
  }
  if (!launch.with_gradient) return;
  const Sum inverse = 1 / sum, background = static_cast<Sum>(uniform);
  const Sum of_label = static_cast<Sum>(1 - launch.smoothing);
  lanes.for_each([=](int lane) {
    for (int64_t c = lane; c < columns; c += kLanes) {
      Sum slope = exponential(wide(row[c]) - top) * inverse - background;
      if (c == label) slope -= of_label;
      store(slope, row[c]);
    }
  });
}

}  // namespace cohort::nmt
