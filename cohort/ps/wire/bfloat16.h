// SPDX-License-Identifier: Apache-2.0
// Conversions between float32 and bfloat16, as bits: the upper half of a float32's. The same bits on
// every machine.
#pragma once
#include <cstdint>
#include <span>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {

/// Each of `to` gets the float32 of the same value as `from`'s, which is as long.
void widen_bfloat16(std::span<const uint16_t> from, std::span<float> to);

/// Rounds `from` into `to`, which is as long, to nearest, ties to even. A value beyond the largest
/// bfloat16 becomes infinite, as IEEE 754 has it; any NaN becomes 0x7fc0.
void round_to_bfloat16(std::span<const float> from, std::span<uint16_t> to);

/// Rounds `from` into `to`, which is as long, to one of the two neighbours: to the one farther from
/// zero with the probability that makes the mean the value. So a value that bfloat16 has stays. One
/// beyond the largest bfloat16 becomes that; infinities stay, any NaN becomes 0x7fc0.
/// The random numbers are a function of `key` and of the number of the value, counted from `first`.
void round_stochastically(uint64_t key, uint64_t first, std::span<const float> from,
                          std::span<uint16_t> to);

/// The key of one push's rounding. `part`: which table or parameter; rows mix their id in.
inline uint64_t rounding_key(uint64_t seed, uint64_t part, uint32_t trainer, uint64_t push) {
  uint64_t key = splitmix64_finalizer(seed + 0x9e3779b97f4a7c15);
  for (const uint64_t word : {part, uint64_t{trainer}, push})
    key = splitmix64_finalizer(key ^ (word + 0x9e3779b97f4a7c15));
  return key;
}
inline uint64_t rounding_key_of_row(uint64_t key, uint64_t id) {
  return splitmix64_finalizer(key ^ id);
}

}  // namespace cohort::ps
