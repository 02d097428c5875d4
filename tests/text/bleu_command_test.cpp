#include <CLI/CLI.hpp>
#include <gtest/gtest.h>
#include <iostream>
#include <sstream>

#include "apps/nmt/bleu.h"
#include "tests/support/message_of.h"
#include "tests/text/text_test_files.h"

namespace cohort::text {
namespace {

constexpr std::string_view kHypotheses =
    "The dog bit the man.\n\u4F60\u597D\uFF0C\u201C\u4E16\u754C\u201D\uFF01\n\n"
    " x-1 3.5 &amp; B\u3000\n";
constexpr std::string_view kReference =
    "The dog bit a man.\n\u4F60\u597D\uFF0C\u4E16\u754C\uFF01\nempty\nx-1 3.5 & b\n";
constexpr std::string_view kSecondReference =
    "The DOG bit the men!\n\u4F60\u597D\u201C\u4E16\u754C\u201D\n\nx 3.5 &quot; B\n";

class BleuCommandTest : public testing::Test {
 protected:
  // Parses and runs `arguments`; returns what was printed.
  std::string run(const std::string& arguments) const {
    CLI::App app;
    std::function<int()> action;
    apps::add_bleu_command(app, action);
    app.parse(arguments);
    testing::internal::CaptureStdout();
    try {
      EXPECT_EQ(action(), 0);
    } catch (...) {
      testing::internal::GetCapturedStdout();
      throw;
    }
    return testing::internal::GetCapturedStdout();
  }

  std::string sacrebleu(const std::string& arguments) const {
    return run_command("'" + test_environment("COHORT_TEST_PYTHON") +
                       "' -m sacrebleu --format text " + arguments);
  }

  const TestFolder folder_;
  const std::string hypotheses_ = folder_.write("hyp", kHypotheses).string();
  const std::string reference_ = folder_.write("ref", kReference).string();
  const std::string second_ = folder_.write("ref2", kSecondReference).string();
};

TEST_F(BleuCommandTest, PrintsWhatSacrebleuPrints) {
  for (const std::string tokenizer : {"13a", "zh", "char", "none"}) {
    EXPECT_EQ(
        run("bleu --ref " + reference_ + " --hyp " + hypotheses_ + " --tokenize " + tokenizer),
        sacrebleu(reference_ + " -i " + hypotheses_ + " -tok " + tokenizer));
  }
  EXPECT_EQ(run("bleu --ref " + reference_ + " --ref " + second_ + " --hyp " + hypotheses_ +
                " --lowercase --width 4"),
            sacrebleu(reference_ + " " + second_ + " -i " + hypotheses_ + " -lc -w 4"));
  EXPECT_EQ(run("bleu --score-only --width 3 --ref " + reference_ + " --hyp " + hypotheses_),
            sacrebleu(reference_ + " -i " + hypotheses_ + " -b -w 3"));
}

TEST_F(BleuCommandTest, ReadsStandardInputWithoutHyp) {
  std::istringstream input{std::string(kHypotheses)};
  std::streambuf* saved = std::cin.rdbuf(input.rdbuf());
  const std::string printed = run("bleu --ref " + reference_);
  std::cin.rdbuf(saved);
  EXPECT_EQ(printed, run("bleu --ref " + reference_ + " --hyp " + hypotheses_));
}

TEST_F(BleuCommandTest, BadInputIsNamed) {
  const std::string longer = folder_.write("longer", "a\nb\n").string();
  EXPECT_EQ(
      test::message_of<ConfigError>([&] { run("bleu --ref " + longer + " --hyp " + hypotheses_); }),
      longer + " has 2 references but " + hypotheses_ + " has 4 hypotheses: expected as many");
  const std::string empty = folder_.write("empty", "").string();
  EXPECT_EQ(
      test::message_of<ConfigError>([&] { run("bleu --ref " + reference_ + " --hyp " + empty); }),
      empty + ": expected hypotheses, found no line");
  EXPECT_THROW(run("bleu"), CLI::RequiredError);
  EXPECT_EQ(test::message_of<ConfigError>([&] { run("bleu --ref x --tokenize intl"); }),
            "--tokenize intl: expected 13a, zh, char or none");
}

}  // namespace
}  // namespace cohort::text
