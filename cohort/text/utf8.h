// SPDX-License-Identifier: Apache-2.0
// UTF-8: strict validation, code points, and the white space that Python's str.split knows.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::text {

/// Returns the offset of the first byte that is not well-formed UTF-8; nothing if all of it is.
///
/// Strict: no overlong forms, no surrogates, nothing above U+10FFFF.
std::optional<size_t> find_invalid_utf8(std::string_view text);

/// Returns the code point at byte `offset` and moves `offset` behind it; nothing, and `offset`
/// stays, if the bytes there are not well-formed. Precondition: offset < text.size().
std::optional<char32_t> next_code_point(std::string_view text, size_t& offset);

/// Returns all code points of `text`.
/// Errors: c10::ValueError that names the byte offset if `text` is not well-formed.
std::u32string decode_utf8(std::string_view text);

/// Appends `code_point` (at most U+10FFFF, no surrogate) to `text`.
void append_utf8(char32_t code_point, std::string& text);

/// Returns the share of Chinese characters (U+3400 to U+9FFF; Japanese has them, too) among those
/// of `texts` that are no white space; 0 if there is none. What is not well-formed does not count.
double han_share(std::span<const std::string> texts);

/// Returns whether `code_point` is white space to Python's str.split and str.strip.
bool is_space(char32_t code_point);

/// Returns `text` without white space (is_space) at its end.
std::string_view trim_right(std::string_view text);

/// Returns `text` without white space (is_space) at both ends.
std::string_view trim(std::string_view text);

}  // namespace cohort::text
