// SPDX-License-Identifier: Apache-2.0
// `cohort bench decode` as a user runs it.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/shell.h"

namespace bench_decode_command_test {

using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

const std::string kSizes = " decode --rows 3 --output-tokens 6 --rounds 3 ";
const std::string kCommand = kSizes + "--preset tiny ";

TEST(BenchDecodeTest, SectionsAddUpToTheBatch) {
  for (const char* flags :
       {"--precision float32", "--precision int8 --beam-size 4 --cpu-threads 2"}) {
    const Ended ended = shell(bin("cohort-bench") + kCommand + "--json " + flags);
    ASSERT_EQ(ended.code, 0) << ended.output;
    const auto line = nlohmann::json::parse(ended.output);
    double ms = 0, share = 0;
    EXPECT_EQ(line["sections"].size(), 6U);
    for (const auto& [name, section] : line["sections"].items()) {
      EXPECT_GT(section["ms"].get<double>(), 0) << name;
      ms += section["ms"].get<double>();
      share += section["share"].get<double>();
    }
    // Sums of six float64 numbers.
    EXPECT_NEAR(ms, line["batch_ms"].get<double>(), 1e-9 * ms);
    EXPECT_NEAR(share, 1, 1e-9);
    EXPECT_GT(line["tokens_per_s"].get<double>(), 0);
  }
}

// Of one search: its sections divide it, and only its start lies outside.
TEST(BenchDecodeTest, SectionsAreTheSearchsTime) {
  const Ended ended = shell(
      bin("cohort-bench") +
      " decode --rows 8 --output-tokens 30 --rounds 1 --preset small --json --precision float32");
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto line = nlohmann::json::parse(ended.output);
  EXPECT_LE(line["batch_ms"].get<double>(), line["wall_ms"].get<double>());
  EXPECT_GE(line["batch_ms"].get<double>(), 0.5 * line["wall_ms"].get<double>());
}

TEST(BenchDecodeTest, PrintsATableAndNamesBadFlags) {
  const Ended table = shell(bin("cohort-bench") + kCommand);
  EXPECT_EQ(table.code, 0) << table.output;
  EXPECT_NE(table.output.find("vocabulary product"), std::string::npos) << table.output;
  for (const auto& [flag, text] : {std::pair{"--beam-size 0", "--beam-size"},
                                   {"--source-tokens 9000", "--source-tokens"},
                                   {"--shortlist x", "--model-dir"},
                                   {"--model-dir /nothing", "/nothing"},
                                   {"--model-dir /nothing --preset tiny", "--preset"}}) {
    const Ended bad = shell(bin("cohort-bench") + kSizes + flag);
    EXPECT_EQ(bad.code, 2) << bad.output;
    EXPECT_NE(bad.output.find(text), std::string::npos) << bad.output;
  }
}

}  // namespace bench_decode_command_test
