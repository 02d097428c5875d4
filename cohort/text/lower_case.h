// SPDX-License-Identifier: Apache-2.0
// Lower case as Python's str.lower gives it: all of Unicode 14, no locale.
#pragma once
#include <string>
#include <string_view>

namespace cohort::text {

/// Returns `text` in lower case.
///
/// Follows Unicode's full mapping: a capital sigma at the end of a word becomes the final sigma,
/// and U+0130 becomes two code points.
/// Errors: c10::ValueError that names the byte offset if `text` is not valid UTF-8.
std::string lower_case(std::string_view text);

}  // namespace cohort::text
