// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/score_text.h"

#include <array>
#include <charconv>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>
#include <utility>

namespace cohort::text {
namespace {

// Writes a number as Python's repr does: the fewest digits that read back as the same number.
std::string shortest(const std::string& number) {
  double value = 0;
  std::from_chars(number.data(), number.data() + number.size(), value);
  const bool plain = value == 0 || (std::abs(value) >= 1e-4 && std::abs(value) < 1e16);
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string result(buffer.data(), end.ptr);
  if (plain && result.find('.') == std::string::npos) result += ".0";
  return result;
}

// None of the texts has a sign that JSON escapes.
std::string entry(const std::string& key, const std::string& value) {
  return " \"" + key + "\": \"" + value + "\"";
}

// sacreBLEU shows no confidence of a score that is 0 in every sample.
bool is_sure(const ScoreText& text) {
  return text.confidence && text.confidence->mean > 0;
}

std::string interval(const ScoreText& text) {
  return "\u03BC = " + decimals(text.confidence->mean, text.width) + " \u00B1 " +
         decimals(text.confidence->half_width, text.width);
}

}  // namespace

std::string decimals(double value, int width) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::fixed << std::setprecision(width) << value;
  return text.str();
}

std::string score_number(const ScoreText& text) {
  const std::string number = decimals(text.score, text.width);
  return is_sure(text) ? number + " (" + interval(text) + ")" : number;
}

std::string score_line(const ScoreText& text) {
  return text.name + "|" + text.signature + " = " + score_number(text) +
         (text.details.empty() ? "" : " ") + text.details;
}

std::string score_json(const ScoreText& text) {
  std::string json = "{\n" + entry("name", text.name) +
                     ",\n \"score\": " + shortest(decimals(text.score, text.width)) + ",\n" +
                     entry("signature", text.signature);
  if (is_sure(text)) {
    json +=
        ",\n \"confidence_mean\": " + shortest(decimals(text.confidence->mean, text.width)) +
        ",\n \"confidence_var\": " + shortest(decimals(text.confidence->half_width, text.width)) +
        ",\n" + entry("confidence", interval(text));
  }
  if (!text.details.empty()) json += ",\n" + entry("verbose_score", text.details);
  std::istringstream pairs(text.signature);
  for (std::string pair; std::getline(pairs, pair, '|');) {
    const size_t colon = pair.find(':');
    json += ",\n" + entry(pair.substr(0, colon), pair.substr(colon + 1));
  }
  return json + "\n}";
}

std::string bootstrap_signature(const std::optional<BootstrapOptions>& bootstrap) {
  if (!bootstrap) return "";
  return "|bs:" + std::to_string(bootstrap->num_samples) +
         "|seed:" + std::to_string(bootstrap->seed);
}

std::string short_signature(const std::string& signature) {
  constexpr std::array<std::pair<const char*, const char*>, 7> kShort{{{"nrefs", "#"},
                                                                       {"seed", "rs"},
                                                                       {"case", "c"},
                                                                       {"eff", "e"},
                                                                       {"smooth", "s"},
                                                                       {"space", "s"},
                                                                       {"version", "v"}}};
  std::string result;
  std::istringstream pairs(signature);
  for (std::string pair; std::getline(pairs, pair, '|');) {
    const size_t colon = pair.find(':');
    std::string key = pair.substr(0, colon);
    for (const auto& [name, short_name] : kShort)
      if (key == name) key = short_name;
    result += (result.empty() ? "" : "|") + key + pair.substr(colon);
  }
  return result;
}

}  // namespace cohort::text
