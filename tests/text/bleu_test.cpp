#include "cohort/text/bleu.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>

#include "cohort/base/error.h"
#include "cohort/text/text_file.h"
#include "cohort/text/utf8.h"

#include "tests/text/text_test_files.h"

namespace cohort::text {
namespace {

// Scores are percentages of counts that agree exactly; what is left is rounding in exp and log.
constexpr double kTolerance = 1e-9;

BleuOptions options_of(const nlohmann::json& json) {
  BleuOptions options;
  options.tokenizer = parse_bleu_tokenizer(json.value("tokenize", "13a"));
  const std::string smoothing = json.value("smooth_method", "exp");
  if (smoothing == "floor") options.smoothing = BleuSmoothing::kFloor;
  if (smoothing == "add-k") options.smoothing = BleuSmoothing::kAddK;
  if (smoothing == "none") options.smoothing = BleuSmoothing::kNone;
  if (json.contains("smooth_value")) options.smoothing_value = json.at("smooth_value");
  options.lowercase = json.value("lowercase", false);
  options.effective_order = json.value("effective_order", false);
  return options;
}

BleuStats corpus_statistics(const nlohmann::json& scored, const BleuOptions& options) {
  BleuStats stats;
  const nlohmann::json& hypotheses = scored.at("hypotheses");
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    std::vector<std::string> references;
    for (const nlohmann::json& lines : scored.at("references")) references.push_back(lines.at(i));
    stats += bleu_statistics(hypotheses.at(i).get<std::string>(), references, options);
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
  const std::string found = signature(options, static_cast<int>(scored.at("references").size()));
  EXPECT_EQ(found, scored.at("signature"));
  EXPECT_EQ(format(score, found), scored.at("line"));
}

std::string random_segment(std::mt19937& random, int longest) {
  static const char32_t kRare[] = {0x85,   0xA0,   0x1680, 0x2000, 0x2001, 0x200B,  0x2028,  0x202F,
                                   0x205F, 0x2A6D, 0x2A6E, 0x3000, 0x3400, 0x4E00,  0x9FBB,  0x9FBC,
                                   0xFF0C, 0xFEFF, 0x130,  0x3A3,  0x3A9,  0x20000, 0x1F600, 0x1C};
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

TEST(BleuTest, EqualsTheRecordedOracle) {
  const nlohmann::json cases = nlohmann::json::parse(
      read_file(test_environment("COHORT_SOURCE") + "/tests/data/text/bleu_oracle.json"));
  ASSERT_GT(cases.size(), 150u);
  for (const nlohmann::json& scored : cases) expect_equal(scored);
}

TEST(BleuTest, EqualsTheLiveOracleOnRandomSegments) {
  constexpr const char* kTokenizers[] = {"13a", "zh", "char", "none"};
  std::mt19937 random(7);
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 400; ++i) {
    nlohmann::json one;
    one["options"] = {{"tokenize", kTokenizers[random() % 4]},
                      {"lowercase", random() % 2 == 0},
                      {"effective_order", random() % 2 == 0}};
    const auto num_references = 1 + random() % 3;
    one["references"] = nlohmann::json::array();
    for (uint32_t r = 0; r < num_references; ++r) {
      one["references"].push_back({random_segment(random, 40), random_segment(random, 12)});
    }
    one["hypotheses"] = {random_segment(random, 40), random_segment(random, 12)};
    cases.push_back(one);
  }
  const TestFolder folder;
  const std::string file = folder.write("cases.json", cases.dump(-1, ' ', true)).string();
  const std::string script =
      test_environment("COHORT_SOURCE") + "/tests/data/text/make_bleu_oracle.py";
  const nlohmann::json results = nlohmann::json::parse(run_command(
      "'" + test_environment("COHORT_TEST_PYTHON") + "' '" + script + "' --score '" + file + "'"));
  ASSERT_EQ(results.size(), cases.size());
  for (const nlohmann::json& scored : results) expect_equal(scored);
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

TEST(BleuTest, BadArgumentsAreErrors) {
  const std::string reference = "a";
  EXPECT_THROW(bleu_statistics("a", {}), c10::ValueError);
  EXPECT_THROW(bleu_statistics("a\xFF", {&reference, 1}), c10::ValueError);
}

}  // namespace
}  // namespace cohort::text
