// SPDX-License-Identifier: Apache-2.0
// Whole numbers in flags.
#pragma once
#include <charconv>
#include <optional>
#include <string_view>

namespace cohort::launch {

/// Reads `text` as a decimal number; nothing if it is empty, too large, or holds anything else.
inline std::optional<int> to_int(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || last != end) return std::nullopt;
  return value;
}

}  // namespace cohort::launch
