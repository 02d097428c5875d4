// SPDX-License-Identifier: Apache-2.0
// BLEU as sacreBLEU 2.6.0 computes it, to the last digit of its output line.
//
// Papineni et al. 2002; Post 2018 for the signature; Chen and Cherry 2014 for smoothing.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cohort/text/bootstrap.h"

namespace cohort::text {

enum class BleuTokenizer {
  k13a,   ///< mteval-v13a's rules, for languages with spaces.
  kIntl,  ///< mteval-v14's rules: punctuation and symbols as Unicode knows them.
  kZh,    ///< One token a Chinese character, the rest as 13a.
  kChar,  ///< One token a character.
  kNone,  ///< Text that is tokenized already: split at white space.
};

/// Parses sacreBLEU's name of a tokenizer, "13a", "intl", "zh", "char" or "none".
/// Errors: ConfigError.
BleuTokenizer parse_bleu_tokenizer(const std::string& text);
std::string to_string(BleuTokenizer tokenizer);

/// Returns why the score of such references says little, a sentence; nothing if it does: k13a finds
/// words at spaces, which Chinese does not have.
std::optional<std::string> tokenizer_warning(BleuTokenizer tokenizer,
                                             std::span<const std::string> references);

enum class BleuSmoothing {
  kExp,    ///< The k-th precision without a match becomes 1 / (2^k total).
  kFloor,  ///< Zero matches count as smoothing_value (default 0.1).
  kAddK,   ///< smoothing_value (default 1) is added to matches and totals above single words.
  kNone,   ///< A precision of zero makes the score zero.
};

/// Parses sacreBLEU's name of a smoothing, "exp", "floor", "add-k" or "none".
/// Errors: ConfigError.
BleuSmoothing parse_bleu_smoothing(const std::string& text);
std::string to_string(BleuSmoothing smoothing);

struct BleuOptions {
  BleuTokenizer tokenizer = BleuTokenizer::k13a;
  bool lowercase = false;
  BleuSmoothing smoothing = BleuSmoothing::kExp;
  /// Of kFloor and kAddK; unset: their default.
  std::optional<double> smoothing_value = std::nullopt;
  bool effective_order = false;  ///< Leave out orders without n-grams; for single sentences.
};

/// Longest n-gram that counts.
inline constexpr int kBleuOrder = 4;

/// Counts of which a score is made. Counts of sentences, or of ranks' shares, add up.
struct BleuStats {
  int64_t sys_len = 0;                           ///< Tokens of the hypotheses.
  int64_t ref_len = 0;                           ///< Tokens of the closest references.
  std::array<int64_t, kBleuOrder> correct = {};  ///< Matched n-grams, n = 1..4.
  std::array<int64_t, kBleuOrder> total = {};    ///< N-grams of the hypotheses, n = 1..4.

  BleuStats& operator+=(const BleuStats& other);
  bool operator==(const BleuStats&) const = default;
};

/// Score and precisions are percentages, 0 to 100.
struct BleuScore {
  double score = 0;
  std::array<double, kBleuOrder> precisions = {};
  double bp = 0;     ///< Brevity penalty.
  double ratio = 0;  ///< sys_len / ref_len; 0 without references' tokens.
  int64_t sys_len = 0;
  int64_t ref_len = 0;
  std::optional<Confidence> confidence = std::nullopt;  ///< If asked for: bleu_confidence.
};

/// Counts one sentence against its references (at least one).
///
/// Local, linear in the lengths. Of several references the one closest in length counts for
/// ref_len, the shorter of two as close.
/// Errors: c10::ValueError if there is no reference or a text is not valid UTF-8.
BleuStats bleu_statistics(std::string_view hypothesis, std::span<const std::string> references,
                          const BleuOptions& options = {});

/// Returns the score of the counts of a whole corpus (or of a sentence).
BleuScore bleu_score(const BleuStats& stats, const BleuOptions& options = {});

/// Returns how sure the score of a corpus of these sentences is, to the last bit as sacreBLEU.
/// Errors: c10::ValueError if there is no sentence.
Confidence bleu_confidence(std::span<const BleuStats> sentences, const BleuOptions& options,
                           const BootstrapOptions& bootstrap);

/// Returns sacreBLEU's signature, "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0";
/// with a confidence "nrefs:1|bs:1000|seed:12345|case:mixed ...".
std::string signature(const BleuOptions& options, int num_references,
                      const std::optional<BootstrapOptions>& bootstrap = std::nullopt);

/// Returns sacreBLEU's line, "BLEU|<signature> = 29.8 61.8/35.8/23.2/15.6 (BP = 0.996 ratio = 0.996
/// hyp_len = 54454 ref_len = 54688)", with `width` decimals in the score.
std::string format(const BleuScore& score, const std::string& signature, int width = 1);

/// Returns sacreBLEU's JSON object, one entry a line, with the score rounded to `width` decimals.
std::string format_json(const BleuScore& score, const std::string& signature, int width = 1);

/// Returns the score alone, with `width` decimals, and its confidence.
std::string format_score(const BleuScore& score, int width = 1);

}  // namespace cohort::text
