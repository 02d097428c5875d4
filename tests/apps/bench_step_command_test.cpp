// SPDX-License-Identifier: Apache-2.0
// `cohort bench step`: its sections are the whole step, and what it says of communication fits together.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/other_flags.h"
#include "tests/support/shell.h"

namespace cohort {
namespace bench_step_command_test {

using nlohmann::json;
using test::bin;
using test::Ended;
using test::shell;

const char* const kSmall =
    " step --preset tiny --depth 2 --vocabulary 2000 --words 200 --steps 2 --rounds 1 "
    "--precision float32 --json 2>/dev/null ";

json profile(const std::string& program, const std::string& flags = "") {
  const Ended ended = shell(program + kSmall + flags);
  EXPECT_EQ(ended.code, 0) << ended.output;
  const json result = json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(result.is_object()) << ended.output;
  return result;
}

json profile_of_ranks(const std::string& ranks, const std::string& flags = "") {
  return profile(bin("cohort") + " run --nproc-per-node " + ranks + " -- " + bin("cohort-bench"),
                 flags);
}

TEST(BenchStepTest, SectionsAddUpToTheStep) {
  const json result = profile_of_ranks("2");
  double sum = 0;
  for (const auto& section : result["sections"]) {
    EXPECT_GE(section["ms"].get<double>(), 0);
    sum += section["ms"].get<double>();
  }
  // The step's own clock runs inside the recorder's: no section is lost, and what the recorder has
  // beyond the step are a few of its own lines, 10 % with an interruption by other programs.
  const double step = result["step_ms"].get<double>();
  EXPECT_GE(sum, step * (1 - 1e-9));
  EXPECT_LE(sum, step * 1.1);
  EXPECT_EQ(result["sections"].size(), 10U);
}

TEST(BenchStepTest, EverySectionOfAStepIsSeen) {
  const json result = profile_of_ranks("2");
  for (const char* name : {"products_forward", "products_dx", "products_dw", "products_vocabulary",
                           "attention", "loss", "optimizer"}) {
    const json& section = result["sections"][name];
    EXPECT_GT(section["ms"].get<double>(), 0) << name;
    EXPECT_GT(section["limit_ms"].get<double>(), 0) << name;
  }
  // dW of layers multiplies as often as forward does; dX does so, too: no layer's input is without a gradient.
  const auto flop = [&](const char* name) {
    const json& section = result["sections"][name];
    return section["gflop_per_s"].get<double>() * section["ms"].get<double>();
  };
  EXPECT_NEAR(flop("products_dw"), flop("products_forward"), 1e-9 * flop("products_forward"));
  EXPECT_NEAR(flop("products_dx"), flop("products_forward"), 1e-9 * flop("products_forward"));
}

TEST(BenchStepTest, TheProcessorsTimeAndPageFaultsAreThoseOfTheStep) {
  const json result = profile_of_ranks("2");
  const json& processor = result["processor"];
  EXPECT_GT(processor["user_ms"].get<double>(), 0);
  EXPECT_GE(processor["sys_ms"].get<double>(), 0);
  double faults = 0;
  size_t sections = 0;
  for (const auto& [name, section] : result["sections"].items()) {
    if (!section.contains("page_faults")) continue;
    EXPECT_GE(section["page_faults"].get<double>(), 0) << name;
    faults += section["page_faults"].get<double>();
    ++sections;
  }
  EXPECT_GT(sections, 0U);
  // Those of the training thread are among those of the process.
  EXPECT_LE(faults, processor["page_faults"].get<double>() * 1.05 + 20);
}

TEST(BenchStepTest, NoMoreCommunicationIsExposedThanThereIs) {
  const json two = profile_of_ranks("2")["communication"];
  EXPECT_GT(two["exposed_ms"].get<double>(), 0);
  EXPECT_LE(two["exposed_ms"].get<double>(), two["total_ms"].get<double>() * (1 + 1e-9));
  EXPECT_GE(two["hidden_ms"].get<double>(), -1e-9 * two["total_ms"].get<double>());
  EXPECT_GT(two["bare_ms"].get<double>(), 0);
  EXPECT_GT(two["all_reduced_bytes"].get<double>(), 0);
}

// Gloo's operations begin on threads of its own, those of shm on the training thread or another.
TEST(BenchStepTest, TheCommunicationAloneIsThatOfTheStepOverEachBackend) {
  for (const std::string backend : {"shm", "gloo", "hierarchical"}) {
    const json result = profile_of_ranks("2", "--dist-backend " + backend);
    const json& communication = result["communication"];
    // Each gradient, in float32, and a few numbers more.
    const double gradients = 4 * result["params"].get<double>();
    EXPECT_GE(communication["all_reduced_bytes"].get<double>(), gradients) << backend;
    EXPECT_LE(communication["all_reduced_bytes"].get<double>(), gradients * 1.01) << backend;
    // 7 MB in less than 10 us would be 700 GB/s.
    EXPECT_GT(communication["bare_ms"].get<double>(), 0.01) << backend;
  }
}

TEST(BenchStepTest, TheFirstStepMayBeMeasured) {
  const json result = profile(bin("cohort-bench"), "--warmup 0");
  EXPECT_EQ(result["steps"], 2);
  EXPECT_GT(result["step_ms"].get<double>(), 0);
  const Ended refused = shell(bin("cohort-bench") + " step --warmup -1");
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_NE(refused.output.find("--warmup -1: expected 0 or more"), std::string::npos)
      << refused.output;
}

TEST(BenchStepTest, RanksWithAnotherVocabularyAreRefusedInOneLine) {
  test::expect_other_flags_refused(bin("cohort-bench") + " step --preset tiny --depth 1",
                                   "--vocabulary", "2000", "2001");
}

TEST(BenchStepTest, SizesThatCannotBeAreRefusedByName) {
  const Ended preset = shell(bin("cohort-bench") + " step --preset huge");
  EXPECT_EQ(preset.code, 2) << preset.output;
  EXPECT_NE(preset.output.find("--preset huge: expected tiny, small, base or big"),
            std::string::npos)
      << preset.output;
  EXPECT_EQ(shell(bin("cohort-bench") + " step --words 0").code, 2);
  const Ended depth = shell(bin("cohort-bench") + " step --depth -1");
  EXPECT_EQ(depth.code, 2) << depth.output;
  EXPECT_NE(depth.output.find("error: --depth -1: expected 0 to 1000 ("), std::string::npos)
      << depth.output;
  const Ended precision = shell(bin("cohort-bench") + " step --preset tiny --precision int8");
  EXPECT_EQ(precision.code, 2) << precision.output;
  EXPECT_NE(precision.output.find("--precision"), std::string::npos) << precision.output;
}

}  // namespace bench_step_command_test
}  // namespace cohort
