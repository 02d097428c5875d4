// SPDX-License-Identifier: Apache-2.0
// Looks a code point up in a generated table. Internal to this folder.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>

namespace cohort::text {

/// Returns the entry whose [first, last] holds `code_point`, or nullptr. The entries are sorted and
/// do not overlap.
template <typename Entry, size_t size>
const Entry* find_entry(const Entry (&table)[size], char32_t code_point) {
  const Entry* next =
      std::upper_bound(std::begin(table), std::end(table), code_point,
                       [](char32_t value, const Entry& entry) { return value < entry.first; });
  if (next == std::begin(table)) return nullptr;
  const Entry* entry = next - 1;
  return code_point <= entry->last ? entry : nullptr;
}

}  // namespace cohort::text
