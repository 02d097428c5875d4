// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/bleu.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/text/category_table.h"

#include "tests/support/environment.h"
#include "tests/text/oracle.h"

namespace cohort::text {
namespace bleu_test {

// Scores are percentages of counts that agree exactly; what is left is rounding in exp and log.
constexpr double kTolerance = 1e-9;

BleuOptions options_of(const nlohmann::json& json) {
  BleuOptions options;
  options.tokenizer = parse_bleu_tokenizer(json.value("tokenize", "13a"));
  options.smoothing = parse_bleu_smoothing(json.value("smooth_method", "exp"));
  if (json.contains("smooth_value")) options.smoothing_value = json.at("smooth_value");
  options.lowercase = json.value("lowercase", false);
  options.effective_order = json.value("effective_order", false);
  return options;
}

BleuStats corpus_statistics(const nlohmann::json& scored, const BleuOptions& options) {
  BleuStats stats;
  const nlohmann::json& hypotheses = scored.at("hypotheses");
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    stats +=
        bleu_statistics(hypotheses.at(i).get<std::string>(), references_of(scored, i), options);
  }
  return stats;
}

// Compares everything that `scored`, a case with the oracle's results, says.
void expect_equal(const nlohmann::json& scored) {
  SCOPED_TRACE(scored.dump());
  const BleuOptions options = options_of(scored.at("options"));
  const BleuStats stats = corpus_statistics(scored, options);
  EXPECT_EQ(stats.sys_len, scored.at("sys_len"));
  EXPECT_EQ(stats.ref_len, scored.at("ref_len"));
  EXPECT_EQ(nlohmann::json(stats.correct), scored.at("correct"));
  EXPECT_EQ(nlohmann::json(stats.total), scored.at("total"));
  const BleuScore score = bleu_score(stats, options);
  EXPECT_NEAR(score.score, scored.at("score"), kTolerance);
  EXPECT_NEAR(score.bp, scored.at("bp"), kTolerance);
  EXPECT_NEAR(score.ratio, scored.at("ratio"), kTolerance);
  for (size_t n = 0; n < kBleuOrder; ++n) {
    EXPECT_NEAR(score.precisions[n], scored.at("precisions")[n], kTolerance);
  }
  expect_same_texts(score, options, scored);
}

TEST(BleuTest, EqualsTheRecordedOracle) {
  const nlohmann::json cases = recorded_oracle("bleu_oracle.json");
  ASSERT_GT(cases.size(), 200u);
  for (const nlohmann::json& scored : cases) expect_equal(scored);
}

TEST(BleuTest, EqualsTheLiveOracleOnRandomSegments) {
  constexpr const char* kTokenizers[] = {"13a", "intl", "zh", "char", "none"};
  std::mt19937 random(7);
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 500; ++i) {
    cases.push_back(random_case(random, {{"tokenize", kTokenizers[random() % 5]},
                                         {"lowercase", random() % 2 == 0},
                                         {"effective_order", random() % 2 == 0}}));
  }
  const nlohmann::json results = live_oracle("make_bleu_oracle.py", cases);
  ASSERT_EQ(results.size(), cases.size());
  for (const nlohmann::json& scored : results) expect_equal(scored);
}

// Writes a table as the script below prints its category.
template <size_t size>
void print(const category_table::Range (&table)[size], std::ostream& out) {
  for (const auto& range : table)
    out << uint32_t{range.first} << '-' << uint32_t{range.last} << ' ';
  out << '\n';
}

TEST(BleuTest, CategoriesAreThoseOfTheLiveOracle) {
  std::ostringstream found;
  print(category_table::kPunctuation, found);
  print(category_table::kSymbol, found);
  print(category_table::kNumber, found);
  const TestFolder folder;
  const auto script = folder.write("categories.py", R"(
import regex
letters = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
for category in "PSN":
    runs = regex.findall(rf"\p{{{category}}}+", letters)
    print("".join(f"{ord(r[0])}-{ord(r[-1])} " for r in runs))
)");
  EXPECT_EQ(found.str(),
            run_command("'" + test::environment("COHORT_TEST_PYTHON") + "' " + script.string()));
}

TEST(BleuTest, CountsOfRanksAddUpToTheCorpus) {
  const std::vector<std::string> hypotheses = {"the cat sat", "on the mat , it is", "x"};
  const std::vector<std::string> references = {"the cat sat down", "on the mat it is", "y z"};
  BleuStats all;
  BleuStats even;
  BleuStats odd;
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    const BleuStats one = bleu_statistics(hypotheses[i], {&references[i], 1});
    all += one;
    (i % 2 == 0 ? even : odd) += one;
  }
  even += odd;
  EXPECT_EQ(even, all);
  EXPECT_EQ(all.sys_len, 10);
}

TEST(BleuTest, LineIsSacrebleusLine) {
  BleuScore score;
  score.score = 29.84;
  score.precisions = {61.83, 35.81, 23.19, 15.55};
  score.bp = 0.99573;
  score.ratio = 0.99572;
  score.sys_len = 54454;
  score.ref_len = 54688;
  const std::string found = signature({.tokenizer = BleuTokenizer::kZh}, 1);
  EXPECT_EQ(format(score, found),
            "BLEU|nrefs:1|case:mixed|eff:no|tok:zh|smooth:exp|version:2.6.0 = 29.8 "
            "61.8/35.8/23.2/15.6 (BP = 0.996 ratio = 0.996 hyp_len = 54454 ref_len = 54688)");
  EXPECT_EQ(format_score(score, 3), "29.840");
  EXPECT_EQ(signature({.lowercase = true, .smoothing = BleuSmoothing::kFloor}, 2),
            "nrefs:2|case:lc|eff:no|tok:13a|smooth:floor[0.10]|version:2.6.0");
}

TEST(BleuTest, NamesOfOptionsAreSacrebleus) {
  for (const std::string name : {"13a", "intl", "zh", "char", "none"}) {
    EXPECT_EQ(to_string(parse_bleu_tokenizer(name)), name);
  }
  for (const std::string name : {"exp", "floor", "add-k", "none"}) {
    EXPECT_EQ(to_string(parse_bleu_smoothing(name)), name);
  }
  EXPECT_THROW(parse_bleu_tokenizer("spm"), ConfigError);
  EXPECT_THROW(parse_bleu_smoothing("add"), ConfigError);
}

TEST(BleuTest, BadArgumentsAreErrors) {
  const std::string reference = "a";
  EXPECT_THROW(bleu_statistics("a", {}), c10::ValueError);
  EXPECT_THROW(bleu_statistics("a\xFF", {&reference, 1}), c10::ValueError);
}

}  // namespace bleu_test
}  // namespace cohort::text
