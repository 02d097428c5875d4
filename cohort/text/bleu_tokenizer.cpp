// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/bleu_tokenizer.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <iterator>
#include <type_traits>

#include "cohort/text/category_table.h"
#include "cohort/text/code_point_table.h"
#include "cohort/text/lower_case.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// ASCII signs that always stand alone: all but letters, digits and ' , - .
bool is_separate_sign(char c) {
  return (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || c == '/' || (c >= ':' && c <= '@') ||
         (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

bool is_point(char c) {
  return c == '.' || c == ',';
}

// The ranges that sacreBLEU's zh tokenizer separates. The last is where it differs from
// what its source means: Extension B is written there as four hex digits and a fifth sign, so that
// comparison of strings admits U+2001 to U+2A6D (quotes, dashes, arrows) and nothing above U+FFFF.
// Scores agree only if this is kept.
bool is_chinese(char32_t c) {
  struct Range {
    char32_t first, last;
  };
  static constexpr Range kRanges[] = {
      {0x3400, 0x4DB5}, {0x4E00, 0x9FA5}, {0x9FA6, 0x9FBB}, {0xF900, 0xFA2D}, {0xFA30, 0xFA6A},
      {0xFA70, 0xFAD9}, {0xFF00, 0xFFEF}, {0x2E80, 0x2EFF}, {0x3000, 0x303F}, {0x31C0, 0x31EF},
      {0x2F00, 0x2FDF}, {0x2FF0, 0x2FFF}, {0x3100, 0x312F}, {0x31A0, 0x31BF}, {0xFE10, 0xFE1F},
      {0xFE30, 0xFE4F}, {0x3200, 0x32FF}, {0x3300, 0x33FF}, {0x2001, 0x2A6D},
  };
  return std::any_of(std::begin(kRanges), std::end(kRanges),
                     [c](const Range& range) { return c >= range.first && c <= range.last; });
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  size_t at = 0;
  while ((at = text.find(from, at)) != std::string::npos) {
    text.replace(at, from.size(), to);
    at += to.size();
  }
}

// Rewrites every place, from the left and without overlap, where `first` and `second` hold for two
// neighbouring letters. Bytes do for letters where only ASCII is matched or changed.
template <typename Letter, typename First, typename Second>
std::basic_string<Letter> rewrite_pairs(
    const std::basic_string<Letter>& text, First first, Second second,
    std::type_identity_t<std::basic_string_view<Letter>> before,
    std::type_identity_t<std::basic_string_view<Letter>> between,
    std::type_identity_t<std::basic_string_view<Letter>> after) {
  std::basic_string<Letter> result;
  result.reserve(text.size() + text.size() / 4);
  for (size_t i = 0; i < text.size(); ++i) {
    if (i + 1 < text.size() && first(text[i]) && second(text[i + 1])) {
      result.append(before).append(1, text[i]).append(between).append(1, text[i + 1]).append(after);
      ++i;
    } else {
      result.push_back(text[i]);
    }
  }
  return result;
}

// The rules that 13a and zh share, in their order.
std::string separate_signs(std::string_view text) {
  std::string line;
  for (const char c : text) {
    if (is_separate_sign(c)) {
      line.append({' ', c, ' '});
    } else {
      line.push_back(c);
    }
  }
  const auto no_digit = [](char c) { return !is_digit(c); };
  const auto is_dash = [](char c) { return c == '-'; };
  line = rewrite_pairs(line, no_digit, is_point, "", " ", " ");
  line = rewrite_pairs(line, is_point, no_digit, " ", " ", "");
  return rewrite_pairs(line, is_digit, is_dash, "", " ", " ");
}

std::string rewrite_13a(std::string_view segment) {
  std::string line(segment);
  replace_all(line, "<skipped>", "");
  replace_all(line, "-\n", "");
  replace_all(line, "\n", " ");
  replace_all(line, "&quot;", "\"");
  replace_all(line, "&amp;", "&");
  replace_all(line, "&lt;", "<");
  replace_all(line, "&gt;", ">");
  return separate_signs(" " + line + " ");
}

std::string rewrite_zh(std::string_view segment) {
  std::string line;
  for (const char32_t c : decode_utf8(trim(segment))) {
    const bool alone = is_chinese(c);
    if (alone) line.push_back(' ');
    append_utf8(c, line);
    if (alone) line.push_back(' ');
  }
  return separate_signs(line);
}

// The rules of mteval-v14: signs of all of Unicode stand alone, punctuation between digits stays.
std::string rewrite_intl(std::string_view segment) {
  const auto is_punctuation = [](char32_t c) {
    return find_entry(category_table::kPunctuation, c) != nullptr;
  };
  const auto no_number = [](char32_t c) {
    return find_entry(category_table::kNumber, c) == nullptr;
  };
  std::u32string letters = decode_utf8(segment);
  letters = rewrite_pairs(letters, no_number, is_punctuation, U"", U" ", U" ");
  letters = rewrite_pairs(letters, is_punctuation, no_number, U" ", U" ", U"");
  std::string line;
  for (const char32_t c : letters) {
    const bool alone = find_entry(category_table::kSymbol, c) != nullptr;
    if (alone) line.push_back(' ');
    append_utf8(c, line);
    if (alone) line.push_back(' ');
  }
  return line;
}

// Splits at white space; with `each_letter` also between any two code points.
std::vector<std::string> split(std::string_view line, bool each_letter) {
  std::vector<std::string> tokens;
  bool inside = false;
  size_t offset = 0;
  while (offset < line.size()) {
    const size_t start = offset;
    const std::optional<char32_t> c = next_code_point(line, offset);
    TORCH_CHECK_VALUE(c, "text is not valid UTF-8 at byte ", offset);
    if (is_space(*c)) {
      inside = false;
      continue;
    }
    if (!inside || each_letter) tokens.emplace_back();
    tokens.back().append(line.substr(start, offset - start));
    inside = true;
  }
  return tokens;
}

}  // namespace

std::vector<std::string> bleu_tokens(std::string_view segment, const BleuOptions& options) {
  std::string lowered;
  if (options.lowercase) {
    lowered = lower_case(segment);
    segment = lowered;
  }
  segment = trim_right(segment);
  switch (options.tokenizer) {
    case BleuTokenizer::k13a:
      return split(rewrite_13a(segment), false);
    case BleuTokenizer::kIntl:
      return split(rewrite_intl(segment), false);
    case BleuTokenizer::kZh:
      return split(rewrite_zh(segment), false);
    case BleuTokenizer::kChar:
      return split(segment, true);
    case BleuTokenizer::kNone:
      break;
  }
  return split(segment, false);
}

}  // namespace cohort::text
