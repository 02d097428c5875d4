// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/utf8.h"

#include <c10/util/Exception.h>
#include <cstdint>

namespace cohort::text {
namespace {

bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

}  // namespace

std::optional<char32_t> next_code_point(std::string_view text, size_t& offset) {
  const auto lead = static_cast<unsigned char>(text[offset]);
  if (lead < 0x80) {
    ++offset;
    return lead;
  }
  size_t length = 0;
  char32_t value = 0;
  char32_t smallest = 0;
  if ((lead & 0xE0) == 0xC0) {
    length = 2, value = lead & 0x1F, smallest = 0x80;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3, value = lead & 0x0F, smallest = 0x800;
  } else if ((lead & 0xF8) == 0xF0) {
    length = 4, value = lead & 0x07, smallest = 0x10000;
  } else {
    return std::nullopt;
  }
  if (text.size() - offset < length) return std::nullopt;
  for (size_t i = 1; i < length; ++i) {
    const char byte = text[offset + i];
    if (!is_continuation(byte)) return std::nullopt;
    value = (value << 6) | (static_cast<unsigned char>(byte) & 0x3F);
  }
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < smallest || value > 0x10FFFF || surrogate) return std::nullopt;
  offset += length;
  return value;
}

std::optional<size_t> find_invalid_utf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    if (!next_code_point(text, offset)) return offset;
  }
  return std::nullopt;
}

std::u32string decode_utf8(std::string_view text) {
  std::u32string result;
  result.reserve(text.size());
  size_t offset = 0;
  while (offset < text.size()) {
    const std::optional<char32_t> code_point = next_code_point(text, offset);
    TORCH_CHECK_VALUE(code_point, "text is not valid UTF-8 at byte ", offset);
    result.push_back(*code_point);
  }
  return result;
}

void append_utf8(char32_t code_point, std::string& text) {
  const auto c = static_cast<uint32_t>(code_point);
  const auto put = [&text](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6)), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12)), put(0x80 | ((c >> 6) & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18)), put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F)), put(0x80 | (c & 0x3F));
  }
}

double han_share(std::span<const std::string> texts) {
  int64_t han = 0, all = 0;
  for (const std::string& text : texts) {
    for (size_t offset = 0; offset < text.size();) {
      const auto code_point = next_code_point(text, offset);
      if (!code_point) {
        ++offset;
      } else if (!is_space(*code_point)) {
        ++all;
        han += *code_point >= 0x3400 && *code_point <= 0x9FFF ? 1 : 0;
      }
    }
  }
  return all > 0 ? static_cast<double>(han) / static_cast<double>(all) : 0;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

std::string_view trim_right(std::string_view text) {
  while (!text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && is_continuation(text[start])) --start;
    const std::optional<char32_t> last = next_code_point(text, start);
    if (!last || start != text.size() || !is_space(*last)) break;
    start = text.size() - 1;
    while (start > 0 && is_continuation(text[start])) --start;
    text = text.substr(0, start);
  }
  return text;
}

std::string_view trim(std::string_view text) {
  text = trim_right(text);
  size_t offset = 0;
  while (offset < text.size()) {
    size_t next = offset;
    const std::optional<char32_t> first = next_code_point(text, next);
    if (!first || !is_space(*first)) break;
    offset = next;
  }
  return text.substr(offset);
}

}  // namespace cohort::text
