// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/lower_case.h"

#include <algorithm>
#include <cstddef>

#include "cohort/text/code_point_table.h"
#include "cohort/text/lower_case_table.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

constexpr char32_t kCapitalSigma = 0x3A3;
constexpr char32_t kSmallSigma = 0x3C3;
constexpr char32_t kFinalSigma = 0x3C2;
constexpr char32_t kCapitalIWithDot = 0x130;
constexpr char32_t kCombiningDotAbove = 0x307;

char32_t lower(char32_t c) {
  const case_table::Mapping* mapping = find_entry(case_table::kLower, c);
  if (!mapping || (c - mapping->first) % mapping->stride != 0) return c;
  return static_cast<char32_t>(static_cast<int32_t>(c) + mapping->distance);
}

bool is_cased(char32_t c) {
  return find_entry(case_table::kCased, c) != nullptr;
}

bool is_ignorable(char32_t c) {
  return find_entry(case_table::kIgnorable, c) != nullptr;
}

// Final: a cased letter stands before it and none behind it, signs in between not counted.
bool is_final_sigma(const std::u32string& text, size_t index) {
  const auto end_before = text.rbegin() + static_cast<std::ptrdiff_t>(text.size() - index);
  const auto before = std::find_if_not(end_before, text.rend(), is_ignorable);
  if (before == text.rend() || !is_cased(*before)) return false;
  const auto start_after = text.begin() + static_cast<std::ptrdiff_t>(index) + 1;
  const auto after = std::find_if_not(start_after, text.end(), is_ignorable);
  return after == text.end() || !is_cased(*after);
}

}  // namespace

std::string lower_case(std::string_view text) {
  const std::u32string letters = decode_utf8(text);
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < letters.size(); ++i) {
    if (letters[i] == kCapitalSigma) {
      append_utf8(is_final_sigma(letters, i) ? kFinalSigma : kSmallSigma, result);
    } else if (letters[i] == kCapitalIWithDot) {
      append_utf8(U'i', result);
      append_utf8(kCombiningDotAbove, result);
    } else {
      append_utf8(lower(letters[i]), result);
    }
  }
  return result;
}

}  // namespace cohort::text
