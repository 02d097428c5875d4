#include "cohort/text/score_text.h"

#include <array>
#include <charconv>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

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

}  // namespace

std::string decimals(double value, int width) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::fixed << std::setprecision(width) << value;
  return text.str();
}

std::string score_json(const ScoreText& text) {
  std::string json = "{\n" + entry("name", text.name) + ",\n \"score\": " + shortest(text.score) +
                     ",\n" + entry("signature", text.signature);
  if (!text.details.empty()) json += ",\n" + entry("verbose_score", text.details);
  std::istringstream pairs(text.signature);
  for (std::string pair; std::getline(pairs, pair, '|');) {
    const size_t colon = pair.find(':');
    json += ",\n" + entry(pair.substr(0, colon), pair.substr(colon + 1));
  }
  return json + "\n}";
}

}  // namespace cohort::text
