// SPDX-License-Identifier: Apache-2.0
// What loops.cpp, attention.h and residual.h compute with, once per instruction set: so all of it is unnamed, and nothing else
// may include it.
#pragma once
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

template <class T>
struct Math {  // float and double compute in themselves
  using Acc = typename SumOf<T>::Type;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return x; }
};

template <>
struct Math<BFloat16Bits> {
  using Acc = SumOf<BFloat16Bits>::Type;
  static float load(BFloat16Bits x) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
  }
  // Round to nearest even. A NaN stays one, whatever its payload.
  static BFloat16Bits store(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7fc0U : rounded)};
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

inline uint64_t random_word(uint64_t key, int64_t number) {
  uint64_t z = key + static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Registers of this instruction set, for what the compiler does not find by itself. Passed by
// reference only: how such values are passed differs between instruction sets.
#if defined(__AVX512F__)
constexpr int64_t kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kRegisterBytes = 32;
#else
constexpr int64_t kRegisterBytes = 16;
#endif

template <class Element, int64_t kBytes = kRegisterBytes>
struct Register {
  static constexpr int64_t kLanes = kBytes / static_cast<int64_t>(sizeof(Element));
  using Type __attribute__((vector_size(kBytes))) = Element;
};
template <class Element>
using RegisterOf = typename Register<Element>::Type;

// A register's elements in memory. By memcpy, the compiler would keep whole arrays of registers there.
template <class Element>
struct Anywhere {
  using Type __attribute__((vector_size(kRegisterBytes), aligned(sizeof(Element)), may_alias)) =
      Element;
};
template <class Element>
inline typename Anywhere<Element>::Type& anywhere(Element* at) {
  return *reinterpret_cast<typename Anywhere<Element>::Type*>(at);
}
template <class Element>
inline const typename Anywhere<Element>::Type& anywhere(const Element* at) {
  return *reinterpret_cast<const typename Anywhere<Element>::Type*>(at);
}

// A register's lanes combined: its halves, until one lane is left.
template <class Acc, int64_t kBytes = kRegisterBytes, class Combine>
inline Acc combine(const typename Register<Acc, kBytes>::Type& lanes, Combine operation) {
  if constexpr (kBytes == 2 * sizeof(Acc)) {
    return operation(lanes[0], lanes[1]);
  } else {
    typename Register<Acc, kBytes / 2>::Type halves[2];
    __builtin_memcpy(halves, &lanes, sizeof halves);
    return combine<Acc, kBytes / 2>(operation(halves[0], halves[1]), operation);
  }
}
template <class Acc>
inline Acc sum_of(const RegisterOf<Acc>& lanes) {
  return combine<Acc>(lanes, [](const auto& x, const auto& y) { return x + y; });
}
template <class Acc>
inline Acc greatest_of(const RegisterOf<Acc>& lanes) {
  return combine<Acc>(lanes, [](const auto& x, const auto& y) { return x > y ? x : y; });
}

}  // namespace
}  // namespace cohort::nmt
