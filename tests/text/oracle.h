// SPDX-License-Identifier: Apache-2.0
// sacreBLEU's own scores, recorded and live, and random text to score.
#pragma once
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cohort/text/text_file.h"
#include "cohort/text/utf8.h"

#include "tests/support/environment.h"
#include "tests/text/text_test_files.h"

namespace cohort::text {

inline std::string random_segment(std::mt19937& random, int longest) {
  // White space, borders of the tokenizers' ranges, letters with special lower cases, and
  // punctuation (P), symbols (S) and numbers (N) beyond ASCII.
  static const char32_t kRare[] = {0x85,   0xA0,    0x1680,  0x2000, 0x2001, 0x200B, 0x2028, 0x202F,
                                   0x205F, 0x2A6D,  0x2A6E,  0x3000, 0x3400, 0x4E00, 0x9FBB, 0x9FBC,
                                   0xFF0C, 0xFEFF,  0x130,   0x3A3,  0x3A9,  0x1C,   0xAB,   0xBF,
                                   0x2019, 0x20AC,  0xD7,    0x2192, 0xB2,   0xBD,   0x661,  0x2167,
                                   0x3007, 0x20000, 0x1F600, 0x1D7CE};
  static const std::string kCommon = "aAbB09.,-&'\";!?<>()/ \n  ";
  std::string text;
  const auto length = static_cast<int>(random() % static_cast<uint32_t>(longest + 1));
  for (int i = 0; i < length; ++i) {
    const auto kind = random() % 8;
    if (kind < 5) {
      text.push_back(kCommon[random() % kCommon.size()]);
    } else if (kind == 5) {
      text += "&amp;";
    } else if (kind == 6) {
      append_utf8(kRare[random() % std::size(kRare)], text);
    } else {
      append_utf8(static_cast<char32_t>(0x4E00 + random() % 4), text);
    }
  }
  return text;
}

/// Returns a case for the oracle: two random segments with one to three references.
inline nlohmann::json random_case(std::mt19937& random, nlohmann::json options) {
  nlohmann::json result;
  result["options"] = std::move(options);
  const auto num_references = 1 + random() % 3;
  result["references"] = nlohmann::json::array();
  for (uint32_t r = 0; r < num_references; ++r) {
    result["references"].push_back({random_segment(random, 40), random_segment(random, 12)});
  }
  result["hypotheses"] = {random_segment(random, 40), random_segment(random, 12)};
  return result;
}

/// Returns the path of a file in tests/data/text.
inline std::string oracle_file(const std::string& name) {
  return test::environment("COHORT_SOURCE") + "/tests/data/text/" + name;
}

inline nlohmann::json recorded_oracle(const std::string& name) {
  return nlohmann::json::parse(read_file(oracle_file(name)));
}

/// Returns `cases` as the script `name` scores them now.
inline nlohmann::json live_oracle(const std::string& name, const nlohmann::json& cases) {
  const TestFolder folder;
  const std::string file = folder.write("cases.json", cases.dump(-1, ' ', true)).string();
  return nlohmann::json::parse(run_command("'" + test::environment("COHORT_TEST_PYTHON") +
                                           "' -B '" + oracle_file(name) + "' --score '" + file +
                                           "'"));
}

/// Returns the references of segment `i` of a case.
inline std::vector<std::string> references_of(const nlohmann::json& scored, size_t i) {
  std::vector<std::string> references;
  for (const nlohmann::json& lines : scored.at("references")) references.push_back(lines.at(i));
  return references;
}

/// Compares signature, line and JSON of `score` with what `scored` says.
template <class Score, class Options>
void expect_same_texts(const Score& score, const Options& options, const nlohmann::json& scored) {
  const std::string found = signature(options, static_cast<int>(scored.at("references").size()));
  EXPECT_EQ(found, scored.at("signature"));
  EXPECT_EQ(format(score, found), scored.at("line"));
  EXPECT_EQ(format_json(score, found, 7), scored.at("json"));
}

}  // namespace cohort::text
