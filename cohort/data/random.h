// SPDX-License-Identifier: Apache-2.0
// A random generator and a shuffle whose results are the same with every compiler and library
// (those of std::shuffle and std::uniform_int_distribution are not).
#pragma once
#include <cstdint>
#include <span>
#include <utility>

namespace cohort::data {

/// SplitMix64: 64 random bits a call, any seed is good.
///
/// Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17,
///         with the mixing constants of Stafford's variant 13.
class SplitMix64 {
 public:
  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}

  /// An independent stream for each (seed, stream) pair: one per epoch, for example.
  constexpr SplitMix64(uint64_t seed, uint64_t stream) : state_(SplitMix64(seed).next() ^ stream) {
    state_ = next();
  }

  constexpr uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  /// Returns a number in [0, bound), each equally likely. `bound` > 0.
  constexpr uint64_t below(uint64_t bound) {
    // The lowest (2^64 mod bound) draws would come up once too often: draw again.
    const uint64_t rejected = (0 - bound) % bound;
    uint64_t draw = next();
    while (draw < rejected) draw = next();
    return draw % bound;
  }

  /// Returns a number in [0, 1), a multiple of 2^-53.
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

/// Permutes `items` in place, each order equally likely (Fisher and Yates).
template <class T>
constexpr void shuffle(std::span<T> items, SplitMix64& random) {
  for (size_t last = items.size(); last > 1; --last) {
    std::swap(items[last - 1], items[random.below(last)]);
  }
}

}  // namespace cohort::data
