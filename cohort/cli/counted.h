// SPDX-License-Identifier: Apache-2.0
// Numbers of things in what programs print.
#pragma once
#include <concepts>
#include <string>

namespace cohort::cli {

/// "1 rank", "2 ranks": `thing` is a word whose plural has an s more.
std::string counted(std::integral auto count, const std::string& thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

}  // namespace cohort::cli
