// SPDX-License-Identifier: Apache-2.0
// One line of Criteo's click data, from text to numbers.
//
//   label \t 13 whole numbers \t 26 categories of up to 8 hexadecimal digits \n
//
// Fields may be empty. Lines to predict for have no label: 39 fields.
#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include "cohort/ps/id_hash.h"

namespace ctr {

inline constexpr int kNumbers = 13;
inline constexpr int kCategories = 26;

enum class Labels {
  kGiven,   ///< 40 fields, the first one 0 or 1.
  kAbsent,  ///< 39 fields; the label reads as 0.
};

/// One example as the network takes it.
struct Example {
  float label = 0;
  std::array<float, kNumbers> numbers{};    ///< log(x + 1); 0 for x < 0 and for none.
  std::array<uint64_t, kCategories> ids{};  ///< category_id of each.
};

/// Where a line is no example.
struct LineFault {
  int field = 0;              ///< From 1.
  const char* expected = "";  ///< What should stand there.
};

/// The 64-bit id of category `value` in `slot`, from 0. No two (slot, value) have the same; a field
/// that is empty is a category of its own.
constexpr uint64_t category_id(int slot, std::optional<uint32_t> value) {
  const uint64_t number = value ? *value : uint64_t{1} << 32;
  return cohort::ps::splitmix64_finalizer(static_cast<uint64_t>(slot + 1) << 33 | number);
}

/// Parses the line at `begin`, whose last character is at end - 1 and is followed by '\n' at `end`.
/// Returns nothing, or the first fault; `example` is whole only without one.
/// Cost: about as much as the line's bytes take to be looked at once; no allocation.
std::optional<LineFault> parse_line(const char* begin, const char* end, Labels labels,
                                    Example& example);

}  // namespace ctr
