// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <gtest/gtest.h>
#include <iostream>
#include <iterator>
#include <sstream>

#include "cohort/cli/parse.h"

#include "apps/nmt/bleu.h"
#include "tests/support/environment.h"
#include "tests/support/message_of.h"
#include "tests/text/text_test_files.h"

namespace cohort::text {
namespace bleu_command_test {

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
    CLI::App app("", "cohort nmt");
    app.require_subcommand(1);
    std::function<int()> action;
    cli::add_bleu_command(app, action);
    std::istringstream stream(arguments);
    std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    cli::spell_out_bleu_names(words);
    cli::parse(app, std::move(words));
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
    return run_command("'" + test::environment("COHORT_TEST_PYTHON") + "' -m sacrebleu --quiet " +
                       arguments);
  }

  // In gzip's form.
  std::string packed(std::string_view text) const {
    const std::string file = folder_.write("to-pack", text).string();
    return run_command("gzip -c " + file);
  }

  // Expects that both print the same for the same arguments.
  void expect_equal(const std::string& arguments) const {
    EXPECT_EQ(run("bleu " + arguments), sacrebleu(arguments)) << arguments;
  }

  const TestFolder folder_;
  const std::string hypotheses_ = folder_.write("hyp", kHypotheses).string();
  const std::string reference_ = folder_.write("ref", kReference).string();
  const std::string second_ = folder_.write("ref2", kSecondReference).string();
};

TEST_F(BleuCommandTest, PrintsWhatSacrebleuPrints) {
  const std::string one = reference_ + " -i " + hypotheses_;
  const std::string two = reference_ + " " + second_ + " --input " + hypotheses_;
  for (const std::string tokenizer : {"13a", "intl", "zh", "char", "none"}) {
    expect_equal(one + " -f text --tokenize " + tokenizer);
  }
  expect_equal(two + " -f text -lc -tok zh -w 4");
  expect_equal(two + " --format text --lowercase -tok=intl --width 0");
  expect_equal(one + " -b -w 3 -f text");
  expect_equal("-f text -s floor " + one);
  expect_equal("-f text --smooth-method add-k -sv 0.25 " + two);
  expect_equal("-f text --smooth-method none --smooth-value 3 " + one);
}

TEST_F(BleuCommandTest, PrintsChrfAndSeveralMetricsAsSacrebleu) {
  const std::string one = reference_ + " -i " + hypotheses_ + " -f text";
  const std::string two = reference_ + " " + second_ + " -i " + hypotheses_ + " -f text";
  expect_equal(one + " -m chrf");
  expect_equal(two + " --metrics chrf -cw 2 -w 5");
  expect_equal(one + " -m bleu chrf");
  expect_equal(two + " -m chrf bleu chrf --chrf-word-order 2 --chrf-lowercase");
  expect_equal(one + " -m bleu chrf -b");
  expect_equal(one + " -m chrf -cc 3 --chrf-beta 1 --chrf-whitespace --chrf-eps-smoothing -w 3");
  expect_equal(one + " -m chrf --chrf-char-order 12 -cw 4 --chrf-beta 0 --score-only");
}

TEST_F(BleuCommandTest, PrintsSentencesAsSacrebleu) {
  const std::string two = reference_ + " " + second_ + " -i " + hypotheses_;
  expect_equal(two + " -sl -f text");
  expect_equal(two + " --sentence-level -w 4 -b -f text");
  expect_equal(two + " -sl -f json -tok zh -lc");
  expect_equal(two + " -m chrf -sl -w 3 -cw 2 -f text");
}

TEST_F(BleuCommandTest, PrintsSacrebleusJson) {
  const std::string one = reference_ + " -f json -i " + hypotheses_;
  expect_equal(one);
  expect_equal(one + " -w 0");
  expect_equal(one + " -m bleu chrf -w 12");
  expect_equal(one + " -m chrf bleu -b");
  expect_equal(one + " -b");
  const std::string same = reference_ + " --format json -i " + reference_;
  expect_equal(same + " -m bleu chrf");
}

// More sentences than orders, so that drawn corpora differ; and one of a single sentence.
TEST_F(BleuCommandTest, IsAsSureAsSacrebleu) {
  std::string hypotheses, references;
  const std::vector<std::string> words{"the", "dog",  "bit", "a",     "man",
                                       "in",  "town", ".",   "\u4F60"};
  for (size_t i = 0; i < 50; ++i) {
    for (size_t k = 0; k < 3 + i % 7; ++k) {
      hypotheses += words[(i * 5 + k * 2) % words.size()] + " ";
      references += words[(i * 5 + k * 2 + (i * k) % 6 / 5) % words.size()] + " ";
    }
    hypotheses += "\n";
    references += "x\n";
  }
  const std::string files = folder_.write("many.ref", references).string() + " -i " +
                            folder_.write("many.hyp", hypotheses).string();
  expect_equal(files + " -f text -ci");
  expect_equal(files + " -f text --confidence -cin 77 -w 12 -m bleu chrf");
  expect_equal(files + " -ci -f json -w 6 -m bleu chrf -cw 2");
  expect_equal(files + " -f text -ci -sh -cin 30 -s floor -w 9");
  expect_equal(files + " -f text -ci -cin 30 -s add-k -sv 0.5 -w 9 -b");
  expect_equal(files + " -f text -ci -cin 30 -m chrf --chrf-eps-smoothing -w 5");
  expect_equal(reference_ + " " + second_ + " -i " + hypotheses_ + " -f text -ci -cin 100 -w 7");
  const std::string one = folder_.write("one", "a b c d e\n").string();
  expect_equal(one + " -i " + one + " -f text -ci -cin 3");
  const std::string other = folder_.write("other", "v w x y z\n").string();
  expect_equal(one + " -i " + other + " -f text -ci -cin 3");
}

TEST_F(BleuCommandTest, PrintsShortSignaturesAndChoosesTheTokenizerAsSacrebleu) {
  const std::string one = reference_ + " -i " + hypotheses_ + " -f text ";
  expect_equal(one + "-sh -lc -tok zh");
  expect_equal(one + "--short -q -m chrf bleu -s add-k");
  expect_equal(one + "-sl --short");
  expect_equal(one + "-l en-zh");
  expect_equal(one + "--language-pair zh-en --quiet");
  expect_equal(one + "-l en-zh -tok intl");
  expect_equal(reference_ + " -i " + hypotheses_ + " -f json -sh");
}

TEST_F(BleuCommandTest, UnpacksFilesAsSacrebleu) {
  const std::string hypotheses = folder_.write("hyp.gz", packed(kHypotheses)).string();
  const std::string reference = folder_.write("ref.gz", packed(kReference)).string();
  expect_equal(reference + " -i " + hypotheses + " -f text -w 5");
  expect_equal(reference_ + " -i " + hypotheses + " -f text -w 5");
}

TEST_F(BleuCommandTest, AByteOrderMarkIsTextAsToSacrebleu) {
  const std::string marked = "\uFEFFThe dog bit the man.\nand so on and on\n";
  const std::string plain = marked.substr(3);
  const std::string hypotheses = folder_.write("marked", marked).string();
  const std::string references = folder_.write("plain", plain).string();
  expect_equal(references + " -i " + hypotheses + " -f text -m bleu chrf -w 6");
  expect_equal(hypotheses + " -i " + hypotheses + " -f text -m bleu chrf -w 6");
  expect_equal(hypotheses + " -i " + references + " -f text -m bleu chrf -w 6 -tok char");
}

TEST_F(BleuCommandTest, NamesOfFilesMayStandInAnyOrder) {
  const std::string expected = run("bleu " + reference_ + " " + second_ + " -i " + hypotheses_);
  EXPECT_EQ(expected,
            run("bleu --ref " + reference_ + " --ref " + second_ + " --hyp " + hypotheses_));
  EXPECT_EQ(expected, run("bleu --hyp " + hypotheses_ + " --ref " + reference_ + " " + second_));
  EXPECT_EQ(expected, run("bleu " + reference_ + " --input " + hypotheses_ + " --ref " + second_));
  EXPECT_EQ(expected.rfind("BLEU|nrefs:2|", 0), 0u) << "text without --format";
}

TEST_F(BleuCommandTest, HelpSaysWhereItDiffersFromSacrebleu) {
  CLI::App app("", "cohort nmt");
  app.require_subcommand(1);
  std::function<int()> action;
  cli::add_bleu_command(app, action);
  testing::internal::CaptureStdout();
  EXPECT_EQ(cli::parse(app, {"bleu", "--help"}), 0);
  const std::string help = testing::internal::GetCapturedStdout();
  for (const char* part : {"cohort nmt bleu", "-tok:", "--chrf-word-order", "text unless json"}) {
    EXPECT_NE(help.find(part), std::string::npos) << part << " in:\n" << help;
  }
}

TEST_F(BleuCommandTest, ReadsStandardInputWithoutHyp) {
  std::istringstream input{std::string(kHypotheses)};
  std::streambuf* saved = std::cin.rdbuf(input.rdbuf());
  const std::string printed = run("bleu --ref " + reference_);
  std::cin.rdbuf(saved);
  EXPECT_EQ(printed, run("bleu --ref " + reference_ + " --hyp " + hypotheses_));
  EXPECT_EQ(printed, sacrebleu(reference_ + " -f text < " + hypotheses_));
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
  EXPECT_EQ(test::message_of<ConfigError>(
                [&] { run("bleu " + reference_ + " -i " + hypotheses_ + " " + second_); }),
            "--input: expected one file, got 2 (references stand before it, or behind --ref)");
  EXPECT_EQ(test::message_of<ConfigError>(
                [&] { run("bleu " + reference_ + " -m bleu chrf -sl -i " + hypotheses_); }),
            "--sentence-level: expected one of --metrics, got bleu and chrf");
  EXPECT_EQ(test::message_of<ConfigError>([&] { run("bleu x --tokenize spm"); }),
            "--tokenize spm: expected 13a, intl, zh, char or none");
  EXPECT_EQ(test::message_of<ConfigError>([&] { run("bleu x -s more"); }),
            "--smooth-method more: expected exp, floor, add-k or none");
  EXPECT_EQ(test::message_of<ConfigError>([&] { run("bleu -i " + hypotheses_ + " -tok zh"); }),
            "--ref is required");
  for (const auto& [arguments, expected] :
       {std::pair{"-ci -sl", "--confidence: expected a corpus's score, not --sentence-level"},
        {"-l en-ja",
         "--language-pair en-ja: expected --tokenize with it, for sacreBLEU's ja-mecab "
         "is not here"},
        {"-l zh", "--language-pair zh: expected source-target, en-zh say"},
        {"-cin 5", "--confidence-n requires --confidence"}}) {
    const std::string command = "bleu " + reference_ + " -i " + hypotheses_ + " " + arguments;
    EXPECT_EQ(test::message_of<ConfigError>([&] { run(command); }), expected);
  }
  const std::string no_gzip = folder_.write("text.gz", "text").string();
  for (const std::string& damaged :
       {no_gzip, folder_.write("cut.gz", packed("a\nb\n").substr(0, 15)).string()}) {
    EXPECT_EQ(test::message_of<ConfigError>([&] { run("bleu " + damaged + " -i " + hypotheses_); }),
              damaged + ": expected a whole gzip file");
  }
  for (const std::string arguments :
       {"-m ter", "-f latex", "-cc 13", "-sv -1", "-w 18", "-tk 13a", "-ci -cin 1"}) {
    EXPECT_THROW(run("bleu x " + arguments), ConfigError) << arguments;
  }
}

TEST_F(BleuCommandTest, ATabInStandardInputIsNoSecondSystem) {
  std::istringstream input("a\nb\tc\nd\ne\n");
  std::streambuf* saved = std::cin.rdbuf(input.rdbuf());
  const std::string message = test::message_of<ConfigError>([&] { run("bleu " + reference_); });
  std::cin.rdbuf(saved);
  EXPECT_EQ(message,
            "standard input: line 2 has a tab, behind which sacreBLEU reads another system: "
            "give the file by --input");
  expect_equal(reference_ + " -f text -i " + folder_.write("tabs", "a\nb\tc\nd\t\ne\n").string());
}

}  // namespace bleu_command_test
}  // namespace cohort::text
