// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/shortlist.h"

#include <algorithm>

namespace cohort::nmt {
namespace {

constexpr int32_t kSpecialPieces = 4;

}  // namespace

Shortlist::Shortlist(const LexicalTable& table, const ShortlistOptions& options)
    : offsets_{0}, target_pieces_(table.target_pieces), joined_(table.joined) {
  for (int32_t piece = 0; piece < kSpecialPieces; ++piece) always_.push_back(piece);
  const auto first = std::clamp<int64_t>(options.first, 0, std::ssize(table.frequent));
  always_.insert(always_.end(), table.frequent.begin(), table.frequent.begin() + first);
  for (size_t source = 0; source + 1 < table.offsets.size(); ++source) {
    const int64_t begin = table.offsets[source];
    const int64_t end =
        begin + std::clamp<int64_t>(options.best, 0, table.offsets[source + 1] - begin);
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      if (static_cast<double>(table.probabilities[i]) >= options.prune)
        targets_.push_back(table.targets[i]);
    }
    offsets_.push_back(std::ssize(targets_));
  }
}

std::vector<int32_t> Shortlist::candidates(std::span<const int64_t> source) const {
  std::vector<bool> chosen(static_cast<size_t>(target_pieces_));
  for (const int32_t piece : always_) chosen[static_cast<size_t>(piece)] = true;
  for (const int64_t piece : source) {
    const auto at = static_cast<size_t>(piece);
    for (auto i = static_cast<size_t>(offsets_[at]); i < static_cast<size_t>(offsets_[at + 1]); ++i)
      chosen[static_cast<size_t>(targets_[i])] = true;
    if (joined_) chosen[at] = true;
  }
  std::vector<int32_t> pieces;
  for (size_t piece = 0; piece < chosen.size(); ++piece)
    if (chosen[piece]) pieces.push_back(static_cast<int32_t>(piece));
  return pieces;
}

}  // namespace cohort::nmt
