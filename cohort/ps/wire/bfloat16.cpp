// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/wire/bfloat16.h"

#include <bit>
#include <cstddef>

#include "cohort/base/instruction_set.h"

namespace cohort::ps {

namespace {

constexpr uint32_t kExponent = 0x7f800000;
constexpr uint32_t kNotSign = 0x7fffffff;
constexpr uint32_t kNan = 0x7fc0;
// Values of a step of the loops below: the compiler makes vectors of as many.
constexpr size_t kStep = 16;

[[gnu::always_inline]] inline uint16_t nearest(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & kNotSign) > kExponent ? kNan : rounded);
}

constexpr uint32_t kGolden = 0x9e3779b1;
constexpr size_t kHalf = kStep / 2;
using Words [[gnu::vector_size(kHalf * sizeof(uint32_t))]] = uint32_t;
using Halves [[gnu::vector_size(kHalf * sizeof(uint16_t))]] = uint16_t;

// Turns a key's first half plus a multiple of kGolden into 32 random bits. The two products mix as
// those of lowbias32 do (Wellons 2018, "Prospecting for hash functions"); the key's second half
// comes between them.
template <class Word>
[[gnu::always_inline]] inline void mix(Word& x, uint32_t high) {
  x = (x ^ x >> 16) * 0x7feb352d + high;
  x = (x ^ x >> 15) * 0x846ca68b;
  x ^= x >> 16;
}

// Leaves the bits of a neighbour in the lower half of `bits`, by 16 random ones: what lies behind
// the upper half carries with just its probability.
template <class Word>
[[gnu::always_inline]] inline void round_by(Word& bits, const Word& random) {
  const Word sum = bits + random;
  const Word rounded = ((sum & kExponent) == kExponent ? bits : sum) >> 16;
  bits = (bits & kNotSign) > kExponent ? rounded * 0 + kNan : rounded;
}

template <class Convert>
[[gnu::always_inline]] inline void for_each_number(size_t count, const Convert& convert) {
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (size_t j = 0; j < kStep; ++j) convert(i + j);
  }
  for (; i < count; ++i) convert(i);
}

[[gnu::always_inline]] inline void round_nearest_loop(const float* from, size_t count,
                                                      uint16_t* to) {
  for_each_number(
      count, [&](size_t i) __attribute__((always_inline)) { to[i] = nearest(from[i]); });
}

// Values j and j + kHalf of an aligned step share a number: each takes half of its bits.
[[gnu::always_inline]] inline void round_random_loop(uint64_t key, uint64_t first,
                                                     const float* from, size_t count,
                                                     uint16_t* to) {
  const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const auto start_of = [low](uint64_t step) {
    return low + static_cast<uint32_t>(step) * static_cast<uint32_t>(kHalf) * kGolden;
  };
  const Words places{0, 1, 2, 3, 4, 5, 6, 7};
  size_t i = 0;
  while (i < count) {
    const uint64_t number = first + i;
    const uint32_t start = start_of(number / kStep);
    const auto place = static_cast<uint32_t>(number % kStep);
    if (place == 0 && i + kStep <= count) {
      Words random = start + places * kGolden, bits{};
      mix(random, high);
      __builtin_memcpy(&bits, from + i, sizeof(bits));
      round_by(bits, random & 0xffff);
      const Halves lower = __builtin_convertvector(bits, Halves);
      __builtin_memcpy(to + i, &lower, sizeof(lower));
      __builtin_memcpy(&bits, from + i + kHalf, sizeof(bits));
      round_by(bits, random >> 16);
      const Halves upper = __builtin_convertvector(bits, Halves);
      __builtin_memcpy(to + i + kHalf, &upper, sizeof(upper));
      i += kStep;
      continue;
    }
    uint32_t random = start + place % static_cast<uint32_t>(kHalf) * kGolden;
    mix(random, high);
    auto bits = std::bit_cast<uint32_t>(from[i]);
    round_by(bits, place < kHalf ? random & 0xffff : random >> 16);
    to[i++] = static_cast<uint16_t>(bits);
  }
}

// What every processor of the build's kind has, and with AVX2, which multiplies eight at a time.
void round_nearest_plain(const float* from, size_t count, uint16_t* to) {
  round_nearest_loop(from, count, to);
}
void round_random_plain(uint64_t key, uint64_t first, const float* from, size_t count,
                        uint16_t* to) {
  round_random_loop(key, first, from, count, to);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void round_nearest_avx2(const float* from, size_t count, uint16_t* to) {
  round_nearest_loop(from, count, to);
}
[[gnu::target("avx2")]] void round_random_avx2(uint64_t key, uint64_t first, const float* from,
                                               size_t count, uint16_t* to) {
  round_random_loop(key, first, from, count, to);
}
bool has_avx2() {
  static const bool kHas = instruction_set() >= InstructionSet::kAvx2;
  return kHas;
}
#endif

}  // namespace

void widen_bfloat16(std::span<const uint16_t> from, std::span<float> to) {
  const uint16_t* const bits = from.data();
  float* const values = to.data();
  for_each_number(from.size(), [&](size_t i) {
    values[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
  });
}

void round_to_bfloat16(std::span<const float> from, std::span<uint16_t> to) {
#if defined(__x86_64__)
  if (has_avx2()) return round_nearest_avx2(from.data(), from.size(), to.data());
#endif
  round_nearest_plain(from.data(), from.size(), to.data());
}

void round_stochastically(uint64_t key, uint64_t first, std::span<const float> from,
                          std::span<uint16_t> to) {
#if defined(__x86_64__)
  if (has_avx2()) return round_random_avx2(key, first, from.data(), from.size(), to.data());
#endif
  round_random_plain(key, first, from.data(), from.size(), to.data());
}

}  // namespace cohort::ps
