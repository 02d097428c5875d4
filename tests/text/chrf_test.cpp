// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/chrf.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/text/oracle.h"

namespace cohort::text {
namespace chrf_test {

// Scores are percentages of counts that agree exactly.
constexpr double kTolerance = 1e-9;

ChrfOptions options_of(const nlohmann::json& json) {
  return {.char_order = json.value("char_order", 6),
          .word_order = json.value("word_order", 0),
          .beta = json.value("beta", 2),
          .lowercase = json.value("lowercase", false),
          .whitespace = json.value("whitespace", false),
          .eps_smoothing = json.value("eps_smoothing", false)};
}

// Compares everything that `scored`, a case with the oracle's results, says.
void expect_equal(const nlohmann::json& scored) {
  SCOPED_TRACE(scored.dump());
  const ChrfOptions options = options_of(scored.at("options"));
  ChrfStats stats;
  const nlohmann::json& hypotheses = scored.at("hypotheses");
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    stats +=
        chrf_statistics(hypotheses.at(i).get<std::string>(), references_of(scored, i), options);
  }
  nlohmann::json expected = scored.at("counts");
  while (expected.size() < stats.counts.size()) expected.push_back(0);
  EXPECT_EQ(nlohmann::json(stats.counts), expected);
  const ChrfScore score = chrf_score(stats, options);
  EXPECT_NEAR(score.score, scored.at("score"), kTolerance);
  expect_same_texts(score, options, scored);
}

TEST(ChrfTest, EqualsTheRecordedOracle) {
  const nlohmann::json cases = recorded_oracle("chrf_oracle.json");
  ASSERT_GT(cases.size(), 150u);
  for (const nlohmann::json& scored : cases) expect_equal(scored);
}

TEST(ChrfTest, EqualsTheLiveOracleOnRandomSegments) {
  std::mt19937 random(11);
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 400; ++i) {
    cases.push_back(random_case(random, {{"char_order", 6 - static_cast<int>(random() % 2)},
                                         {"word_order", static_cast<int>(random() % 2) * 2},
                                         {"beta", 1 + static_cast<int>(random() % 2)},
                                         {"lowercase", random() % 2 == 0},
                                         {"whitespace", random() % 2 == 0},
                                         {"eps_smoothing", random() % 2 == 0}}));
  }
  const nlohmann::json results = live_oracle("make_chrf_oracle.py", cases);
  ASSERT_EQ(results.size(), cases.size());
  for (const nlohmann::json& scored : results) expect_equal(scored);
}

TEST(ChrfTest, CountsOfRanksAddUpToTheCorpus) {
  const std::vector<std::string> hypotheses = {"the cat sat", "on the mat , it is", "x"};
  const std::vector<std::string> references = {"the cat sat down", "on the mat it is", "y z"};
  const ChrfOptions options{.word_order = 2};
  ChrfStats all;
  ChrfStats even;
  ChrfStats odd;
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    const ChrfStats one = chrf_statistics(hypotheses[i], {&references[i], 1}, options);
    all += one;
    (i % 2 == 0 ? even : odd) += one;
  }
  even += odd;
  EXPECT_EQ(even, all);
  EXPECT_EQ(all.counts[0], 9 + 13 + 1);
  EXPECT_EQ(all.counts[1], 13 + 12 + 2);
}

TEST(ChrfTest, LineNamesTheVariant) {
  const std::string reference = "a b";
  const ChrfOptions options{.word_order = 2, .beta = 3, .whitespace = true};
  const ChrfScore score = chrf_score(chrf_statistics("a b", {&reference, 1}, options), options);
  EXPECT_EQ(format(score, signature(options, 2), 2),
            "chrF3++|nrefs:2|case:mixed|eff:yes|nc:6|nw:2|space:yes|version:2.6.0 = 100.00");
  EXPECT_EQ(format_score(score, 0), "100");
}

TEST(ChrfTest, BadArgumentsAreErrors) {
  const std::string reference = "a";
  const std::span<const std::string> one(&reference, 1);
  EXPECT_THROW(chrf_statistics("a", {}), c10::ValueError);
  EXPECT_THROW(chrf_statistics("a\xFF", one), c10::ValueError);
  EXPECT_THROW(chrf_statistics("a", one, {.char_order = 0}), c10::ValueError);
  EXPECT_THROW(chrf_statistics("a", one, {.char_order = kMaxChrfCharOrder + 1}), c10::ValueError);
  EXPECT_THROW(chrf_statistics("a", one, {.word_order = kMaxChrfWordOrder + 1}), c10::ValueError);
  EXPECT_THROW(chrf_score({}, {.beta = -1}), c10::ValueError);
}

}  // namespace chrf_test
}  // namespace cohort::text
