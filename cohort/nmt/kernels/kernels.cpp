// Compiled once per instruction set, with COHORT_KERNELS naming the table that it defines.
// Includes nothing with inline functions that other files share: the linker might keep the wrong
// copy.
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {
namespace {

template <class T>
struct Math {  // float and double compute in themselves
  using Acc = T;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return x; }
};

template <>
struct Math<BFloat16Bits> {
  using Acc = float;
  static float load(BFloat16Bits x) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
  }
  // Round to nearest even. A NaN stays one: its payload's top bits survive the addition here
  // because quiet NaNs of arithmetic are 0x7fc00000.
  static BFloat16Bits store(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
  }
};

// exp for x <= 0 with a relative error near 1e-7: 2^k * polynomial on [-ln2/2, ln2/2] (Cephes'
// split of ln 2).
inline float exponential(float x) {
  x = x < -87.0F ? -87.0F : x;
  const float k = __builtin_floorf(x * 1.44269504F + 0.5F);
  const float r = (x - k * 0.693359375F) - k * -2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(k) + 127) << 23;
  return p * __builtin_bit_cast(float, exponent);
}
inline double exponential(double x) {
  return __builtin_exp(x);
}
inline double logarithm(double x) {
  return __builtin_log(x);
}

constexpr int64_t kBlock = 512;

// Four 16-bit random numbers from each hashed counter (finalizer of splitmix64).
inline void random_block(uint64_t key, int64_t first, uint16_t* out) {
  uint64_t words[kBlock / 4];
#pragma omp simd
  for (int64_t w = 0; w < kBlock / 4; ++w) {
    uint64_t z = key + static_cast<uint64_t>(first / 4 + w) * 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    words[w] = z ^ (z >> 31);
  }
  __builtin_memcpy(out, words, sizeof words);
}

template <class T>
void dropout(const T* x, T* out, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  uint16_t random[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    random_block(rule.key, first, random);
    const int64_t count = n - first < kBlock ? n - first : kBlock;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc kept = M::load(x[first + i]) * rule.scale;
      out[first + i] = M::store(random[i] < rule.threshold ? 0 : kept);
    }
  }
}

template <class T>
void relu_dropout(const T* x, T* out, int64_t n, DropoutRule rule) {
  using M = Math<T>;
  uint16_t random[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    random_block(rule.key, first, random);
    const int64_t count = n - first < kBlock ? n - first : kBlock;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const typename M::Acc value = M::load(x[first + i]);
      const typename M::Acc kept = value > 0 ? value * rule.scale : 0;
      out[first + i] = M::store(random[i] < rule.threshold ? 0 : kept);
    }
  }
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

template <class T>
constexpr KernelsOf<T> table() {
  return {dropout<T>, relu_dropout<T>,     relu_dropout_backward<T>,
          softmax<T>, softmax_backward<T>, cross_entropy<T>};
}

}  // namespace

#define COHORT_STRING_OF(x) #x
#define COHORT_NAME(x) COHORT_STRING_OF(x)
extern const Kernels COHORT_KERNELS;
const Kernels COHORT_KERNELS = {COHORT_NAME(COHORT_KERNELS), table<float>(), table<double>(),
                                table<BFloat16Bits>()};

}  // namespace cohort::nmt
