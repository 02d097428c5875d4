// SPDX-License-Identifier: Apache-2.0
// chrF as sacreBLEU 2.6.0 computes it: F-score of character n-grams, and with them (chrF++) of
// word n-grams.
//
// Popovic 2015 (chrF), 2017 (chrF++).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cohort/text/bootstrap.h"

namespace cohort::text {

/// Longest n-grams that ChrfStats has room for.
inline constexpr int kMaxChrfCharOrder = 12;
inline constexpr int kMaxChrfWordOrder = 4;

struct ChrfOptions {
  int char_order = 6;       ///< Longest n-gram of characters, 1 to kMaxChrfCharOrder.
  int word_order = 0;       ///< Longest of words, 0 to kMaxChrfWordOrder; 2 makes it chrF++.
  int beta = 2;             ///< Recall weighs beta times as much as precision; 0 to 1000.
  bool lowercase = false;   ///< Compare in lower case.
  bool whitespace = false;  ///< White space counts as characters.
  /// Every order counts, one without n-grams as next to nothing; else (sacreBLEU's default) the
  /// average is over the orders of which both sides have n-grams.
  bool eps_smoothing = false;
};

/// Counts of which a score is made. Counts of sentences, or of ranks' shares, add up where their
/// options have the same orders.
struct ChrfStats {
  /// For each order three: n-grams of the hypotheses, of the references, and matched. Characters
  /// from order 1 up, then words from order 1 up, then zeros. Where a reference has no n-gram of
  /// an order, the hypothesis's do not count.
  std::array<int64_t, 3 * static_cast<size_t>(kMaxChrfCharOrder + kMaxChrfWordOrder)> counts = {};

  ChrfStats& operator+=(const ChrfStats& other);
  bool operator==(const ChrfStats&) const = default;
};

struct ChrfScore {
  double score = 0;  ///< 0 to 100.
  std::string name;  ///< "chrF2", with a "+" for each word order: "chrF2++".
  std::optional<Confidence> confidence = std::nullopt;  ///< If asked for: chrf_confidence.
};

/// Counts one sentence against its references (at least one): against the one that gives the best
/// score, the first of equals.
///
/// Local, linear in the lengths. A word's last sign of ASCII punctuation, or else its first, is a
/// word of its own.
/// Errors: c10::ValueError if there is no reference, a text is not valid UTF-8 or an option is out
/// of its range.
ChrfStats chrf_statistics(std::string_view hypothesis, std::span<const std::string> references,
                          const ChrfOptions& options = {});

/// Returns the score of the counts of a whole corpus (or of a sentence).
/// Errors: c10::ValueError if an option is out of its range.
ChrfScore chrf_score(const ChrfStats& stats, const ChrfOptions& options = {});

/// Returns how sure the score of a corpus of these sentences is, to the last bit as sacreBLEU.
/// Errors: c10::ValueError if there is no sentence, or an option is out of its range.
Confidence chrf_confidence(std::span<const ChrfStats> sentences, const ChrfOptions& options,
                           const BootstrapOptions& bootstrap);

/// Returns sacreBLEU's signature, "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0";
/// with a confidence "nrefs:1|bs:1000|seed:12345|case:mixed ...".
std::string signature(const ChrfOptions& options, int num_references,
                      const std::optional<BootstrapOptions>& bootstrap = std::nullopt);

/// Returns sacreBLEU's line, "chrF2|<signature> = 54.7", with `width` decimals.
std::string format(const ChrfScore& score, const std::string& signature, int width = 1);

/// Returns sacreBLEU's JSON object, one entry a line, with the score rounded to `width` decimals.
std::string format_json(const ChrfScore& score, const std::string& signature, int width = 1);

/// Returns the score alone, with `width` decimals, and its confidence.
std::string format_score(const ChrfScore& score, int width = 1);

}  // namespace cohort::text
