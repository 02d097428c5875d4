// SPDX-License-Identifier: Apache-2.0
// Whether ranks were told which of them calls what.
#pragma once
#include <string>

namespace cohort::test {

/// Whether `output` names the call `odd` of the rank that differs beside the call `usual` of another
/// one. Which other rank that is depends on who has come, and so does which of the two is first.
inline bool names_difference(const std::string& output, int world_size, int odd_rank,
                             const std::string& odd, const std::string& usual) {
  const auto in_order = [&](const std::string& first, const std::string& second) {
    const size_t found = output.find(first);
    return found != std::string::npos && output.find("where " + second, found) != std::string::npos;
  };
  const std::string differs = "rank " + std::to_string(odd_rank) + " calls " + odd;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string other = "rank " + std::to_string(rank) + " calls " + usual;
    if (rank != odd_rank && (in_order(differs, other) || in_order(other, differs))) return true;
  }
  return false;
}

}  // namespace cohort::test
