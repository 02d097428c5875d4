// SPDX-License-Identifier: Apache-2.0
// Bytes as text.
#pragma once
#include <span>
#include <string>

namespace cohort {

/// Returns two lower-case hexadecimal digits for each byte.
inline std::string hex(std::span<const unsigned char> bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace cohort
