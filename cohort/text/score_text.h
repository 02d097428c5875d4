// SPDX-License-Identifier: Apache-2.0
// How sacreBLEU writes a score. Internal to bleu.h and chrf.h.
#pragma once
#include <optional>
#include <string>

#include "cohort/text/bootstrap.h"

namespace cohort::text {

/// Returns `value` with `width` decimals, whatever the locale.
std::string decimals(double value, int width);

struct ScoreText {
  std::string name;
  double score = 0;
  std::optional<Confidence> confidence;
  int width = 1;          ///< Decimals of the score and its confidence.
  std::string signature;  ///< "key:value" pairs with "|" between them.
  std::string details;    ///< What follows the score in the line of text; may be empty.
};

/// Returns the score, and its confidence behind it if there is one that is above 0.
std::string score_number(const ScoreText& text);

/// Returns sacreBLEU's line.
std::string score_line(const ScoreText& text);

/// Returns sacreBLEU's JSON object: an entry for each field, then one for each pair of the
/// signature, each on a line of its own.
std::string score_json(const ScoreText& text);

/// Returns the part of a signature that says how the confidence was found: "|bs:1000|seed:12345".
std::string bootstrap_signature(const std::optional<BootstrapOptions>& bootstrap);

}  // namespace cohort::text
