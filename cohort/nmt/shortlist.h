// SPDX-License-Identifier: Apache-2.0
// Which target pieces a search may choose from: for each sentence those that its source pieces may translate to, and the
// most frequent.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace cohort::nmt {

/// How likely each source piece is to translate to which target piece.
struct LexicalTable {
  std::vector<int64_t> offsets;      ///< [source pieces + 1], from 0: where a source piece's begin.
  std::vector<int32_t> targets;      ///< Each source piece's, the likeliest first.
  std::vector<float> probabilities;  ///< Of each of them.
  std::vector<int32_t> frequent;     ///< Target pieces, the most frequent first.
  int64_t target_pieces = 0;         ///< Of the vocabulary.
  bool joined = false;               ///< One vocabulary serves both sides.
  int64_t best = 0;                  ///< Of a source piece no more targets than this were kept.
};

struct ShortlistOptions {
  int64_t first = 100;  ///< Most frequent target pieces.
  int64_t best = 100;   ///< Likeliest of each source piece.
  double prune = 0;     ///< Of these only such as have at least this probability.
};

/// A sentence's candidates: the special pieces, the `first` most frequent, the `best` of each of its pieces, the end id's among
/// them, and with a joined vocabulary its own pieces.
///
/// Threads: any number may ask.
class Shortlist {
 public:
  /// Precondition: `table` is as its fields say; ids are those of a vocabulary.
  Shortlist(const LexicalTable& table, const ShortlistOptions& options);

  /// Ascending; the first four are the special pieces. They are a function of which pieces `source` has.
  std::vector<int32_t> candidates(std::span<const int64_t> source) const;
  int64_t source_pieces() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t target_pieces() const { return target_pieces_; }

 private:
  std::vector<int32_t> always_;
  std::vector<int64_t> offsets_;
  std::vector<int32_t> targets_;  // those left of the table's
  int64_t target_pieces_;
  bool joined_;
};

}  // namespace cohort::nmt
