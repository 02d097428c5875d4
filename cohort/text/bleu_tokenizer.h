// SPDX-License-Identifier: Apache-2.0
// Cuts a segment into tokens as sacreBLEU 2.6.0 does before it counts n-grams. Internal to bleu.h.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cohort/text/bleu.h"

namespace cohort::text {

/// Returns the tokens of `segment`.
/// Errors: c10::ValueError if it is not valid UTF-8.
std::vector<std::string> bleu_tokens(std::string_view segment, const BleuOptions& options);

}  // namespace cohort::text
