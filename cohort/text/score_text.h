// How sacreBLEU writes a score. Internal to bleu.h and chrf.h.
#pragma once
#include <string>

namespace cohort::text {

/// Returns `value` with `width` decimals, whatever the locale.
std::string decimals(double value, int width);

struct ScoreText {
  std::string name;
  std::string score;      ///< As decimals() gives it.
  std::string signature;  ///< "key:value" pairs with "|" between them.
  std::string details;    ///< What follows the score in the line of text; may be empty.
};

/// Returns sacreBLEU's JSON object: an entry for each field, then one for each pair of the
/// signature, each on a line of its own.
std::string score_json(const ScoreText& text);

}  // namespace cohort::text
