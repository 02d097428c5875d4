// SPDX-License-Identifier: Apache-2.0
// `cohort nmt translate` as a stream, and `cohort nmt score`.
#include <algorithm>
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "tests/apps/nmt_command.h"
#include "tests/support/shell.h"

namespace nmt_text_test {

using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::lines_of;
using cohort::test::shell;

class NmtTextTest : public cohort::test::NmtCommand {
 protected:
  void SetUp() override {
    NmtCommand::SetUp();
    const Ended trained =
        shell(bin("cohort-nmt") + " " + train_flags("run") + "--after-epochs 4 --max-length 20");
    ASSERT_EQ(trained.code, 0) << trained.output;
  }
  std::string nmt(const std::string& command) const {
    const size_t space = command.find(' ');
    return bin("cohort-nmt") + " " + command.substr(0, space) +
           " --precision float32 --model-dir " + path("run") +
           (space == std::string::npos ? "" : command.substr(space));
  }
  std::string valid() const { return path("valid.en") + " " + path("valid.xx"); }
  // Most memory of a process that translates `lines` lines, in KiB.
  long peak_memory(int lines) const {
    std::ofstream file(path("input"));
    for (int i = 0; i < lines; ++i) file << "red cat\n";
    file.close();
    const pid_t child = fork();
    if (child == 0) {
      execl("/bin/sh", "sh", "-c",
            ("exec " + nmt("translate --beam-size 1 --max-output-length 4") + " < " +
             path("input") + " > /dev/null")
                .c_str(),
            nullptr);
      _exit(127);
    }
    int status = 0;
    rusage usage{};
    EXPECT_EQ(wait4(child, &status, 0, &usage), child);
    EXPECT_EQ(status, 0);
    return usage.ru_maxrss;
  }
};

TEST_F(NmtTextTest, ScoresSumToEvaluatesLoss) {
  const Ended evaluated = shell(nmt("evaluate --json --test-sets " + valid()));
  ASSERT_EQ(evaluated.code, 0) << evaluated.output;
  const double loss = nlohmann::json::parse(evaluated.output)["loss"];
  const Ended scored =
      shell(nmt("score --json --word-scores --mini-batch-words 64 --test-sets " + valid()));
  ASSERT_EQ(scored.code, 0) << scored.output;
  double sum = 0;
  int64_t tokens = 0;
  const auto lines = lines_of(scored.output);
  EXPECT_EQ(lines.size(), 40U);
  for (const std::string& line : lines) {
    const auto row = nlohmann::json::parse(line);
    const auto words = row["word_scores"].get<std::vector<double>>();
    EXPECT_EQ(std::ssize(words), row["tokens"].get<int64_t>());
    EXPECT_NEAR(std::accumulate(words.begin(), words.end(), 0.0), row["log_prob"].get<double>(),
                1e-9);
    sum += row["log_prob"].get<double>();
    tokens += row["tokens"].get<int64_t>();
  }
  // float32 logits of order 10, 60 to sum over: about 1e-5 a token, and errors of both signs.
  EXPECT_NEAR(-sum / static_cast<double>(tokens), loss, 1e-5);
}

TEST_F(NmtTextTest, EvaluatePrintsWhatSacrebleuWould) {
  const std::string evaluate = nmt("evaluate --tokenize 13a --test-sets " + valid());
  const Ended evaluated = shell(evaluate + " --output " + path("out"));
  const Ended as_json = shell(evaluate + " --json");
  ASSERT_EQ(evaluated.code, 0) << evaluated.output;
  const auto json = nlohmann::json::parse(as_json.output);
  for (const char* metric : {"bleu", "chrf"}) {
    const Ended line = shell(bin("cohort-nmt") + " bleu -m " + metric + " --ref " +
                             path("valid.xx") + " -i " + path("out"));
    ASSERT_EQ(line.code, 0) << line.output;
    EXPECT_NE(evaluated.output.find("\n" + line.output), std::string::npos)
        << line.output << evaluated.output;
    const std::string score = line.output.substr(line.output.find(" = ") + 3);
    EXPECT_NEAR(json[metric].get<double>(), std::stod(score), 0.05);  // printed to one decimal
  }
  EXPECT_EQ(json["chrf_signature"], "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0");
}

TEST_F(NmtTextTest, ScoresOfTranslationsAreThoseOfTheSearch) {
  const Ended found =
      shell(nmt("translate --n-best --beam-size 3 --normalize 0.6 < ") + path("valid.en"));
  ASSERT_EQ(found.code, 0) << found.output;
  const auto sources = lines_of(contents(path("valid.en")));
  std::ofstream table(path("found.tsv"));
  std::vector<std::array<double, 2>> expected;
  for (const std::string& line : lines_of(found.output)) {
    const size_t text = line.find(" ||| ") + 5;
    const size_t log_prob = line.find(" ||| Logprob= ", text);
    const size_t score = line.find(" ||| ", log_prob + 5);
    table << sources.at(std::stoul(line)) << "\t" << line.substr(text, log_prob - text) << "\n";
    expected.push_back({std::stod(line.substr(log_prob + 14)), std::stod(line.substr(score + 5))});
  }
  table.close();
  const Ended scored = shell(nmt("score --json --normalize 0.6 --test-sets " + path("found.tsv")));
  ASSERT_EQ(scored.code, 0) << scored.output;
  const auto lines = lines_of(scored.output);
  ASSERT_EQ(lines.size(), expected.size());
  int equal = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto row = nlohmann::json::parse(lines[i]);
    // Other pieces may spell the same text: then, and only then, the search's is another.
    const bool same = std::abs(row["log_prob"].get<double>() - expected[i][0]) < 1e-4;
    equal += same ? 1 : 0;
    if (same) {
      EXPECT_NEAR(row["score"].get<double>(), expected[i][1], 1e-4) << lines[i];
    }
  }
  EXPECT_GE(equal, static_cast<int>(lines.size()) * 3 / 4);
  // The best of each sentence are words the model has learnt to spell.
  for (size_t i = 0; i < lines.size(); i += 3)
    EXPECT_NEAR(nlohmann::json::parse(lines[i])["log_prob"].get<double>(), expected[i][0], 1e-4);
}

TEST_F(NmtTextTest, EveryLineHasItsScoreInOrder) {
  std::ofstream(path("pairs.tsv")) << "red cat\tder tac\n\t\nred\t\nblue dog\teulb god\n";
  const Ended ended = shell(nmt("score --word-scores --test-sets " + path("pairs.tsv")));
  const auto lines = lines_of(ended.output);
  ASSERT_EQ(lines.size(), 4U) << ended.output;
  const Ended alone = shell("printf 'blue dog\\teulb god\\n' > " + path("one.tsv") + "; " +
                            nmt("score --test-sets " + path("one.tsv")));
  EXPECT_NEAR(std::stod(lines[3]), std::stod(alone.output), 1e-4);
  EXPECT_NE(lines[1].find(" ||| WordScores= -"), std::string::npos) << "the end mark alone";
  EXPECT_EQ(std::count(lines[1].begin(), lines[1].end(), '-'), 2) << lines[1];

  const std::string model = " --model-dir " + path("run");
  std::ofstream(path("short.xx")) << "a\nb\n";
  expect_refused("score --test-sets " + path("valid.en") + " " + path("short.xx") + model,
                 "short.xx ends after 2 lines but " + path("valid.en") + " has more");
  expect_refused("score --test-sets " + path("valid.en") + model, "expected a .tsv file, or two");
  expect_refused("score --test-sets " + path("none.tsv") + model, "none.tsv: cannot be read");
  std::filesystem::create_symlink("loop.tsv", path("loop.tsv"));
  expect_refused("score --test-sets " + path("loop.tsv") + model, "loop.tsv: cannot be read");
  std::ofstream(path("three.tsv")) << "a\tb\na\tb\tc\n";
  expect_refused("score --test-sets " + path("three.tsv") + model, "line 2: expected source<TAB>");
  std::ofstream(path("broken.tsv")) << "a\tb\n\xff\tb\n";
  expect_refused("score --test-sets " + path("broken.tsv") + model, "line 2 is not valid UTF-8");
}

TEST_F(NmtTextTest, ALineThatIsTooLongIsNamedAfterTheScoresBeforeIt) {
  std::string words;
  for (int i = 0; i < 6000; ++i) words += "red ";
  std::ofstream(path("long.tsv")) << "red\tder\nblue\teulb\n" << words << "\tder\none\teno\n";
  std::ofstream(path("two.en")) << "red\nblue\n";
  std::ofstream(path("two.xx")) << "der\n" << words << "\n";
  const auto expect_scores_then = [&](const std::string& sets, size_t scores,
                                      const std::string& error) {
    const Ended ended = shell(nmt("score --test-sets " + sets) + " 2> " + path("errors"));
    const std::string errors = contents(path("errors"));
    EXPECT_EQ(ended.code, 2) << errors;
    EXPECT_EQ(lines_of(ended.output).size(), scores) << ended.output;
    EXPECT_EQ(lines_of(errors).size(), 1U) << errors;
    EXPECT_NE(errors.find(error), std::string::npos) << errors;
    EXPECT_NE(errors.find(" tokens: expected at most 4999"), std::string::npos) << errors;
  };
  expect_scores_then(path("long.tsv"), 2, path("long.tsv") + ": line 3 has 6");
  expect_scores_then(path("two.en") + " " + path("two.xx"), 1, path("two.xx") + ": line 2 has ");
  const Ended evaluated = shell(nmt("evaluate --test-sets " + path("long.tsv")));
  EXPECT_EQ(evaluated.code, 2) << evaluated.output;
  EXPECT_NE(evaluated.output.find("--test-sets: pair 3 has 6"), std::string::npos)
      << evaluated.output;
}

TEST_F(NmtTextTest, AnswersEachLineAtOnceWhenAskedTo) {
  const std::string translate = nmt("translate --mini-batch 1 --maxi-batch 1");
  std::ofstream(path("talk.sh")) << "coproc T { " << translate << "; }\n"
                                 << "for word in red cat; do\n"
                                 << "  echo $word >&${T[1]}\n"
                                 << "  IFS= read -r -t 30 answer <&${T[0]} || exit 9\n"
                                 << "  echo \"$word $answer\"\n"
                                 << "done\n";
  const Ended talk = shell("bash " + path("talk.sh"));
  EXPECT_EQ(talk.code, 0) << talk.output;
  EXPECT_EQ(lines_of(talk.output).size(), 2U) << talk.output;
}

TEST_F(NmtTextTest, ATerminalsLinesAreAnsweredAtOnce) {
  int terminal = -1;
  std::array<int, 2> out{};
  ASSERT_EQ(pipe(out.data()), 0);
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    dup2(out[1], STDOUT_FILENO);
    execl("/bin/sh", "sh", "-c", ("exec " + nmt("translate")).c_str(), nullptr);
    _exit(127);
  }
  close(out[1]);
  const std::string typed = "red\n";
  ASSERT_EQ(write(terminal, typed.data(), typed.size()), std::ssize(typed));
  std::array<char, 100> answer{};
  EXPECT_GT(read(out[0], answer.data(), answer.size()), 0) << "before the end of input";
  close(terminal);
  close(out[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
}

TEST_F(NmtTextTest, MemoryDoesNotGrowWithTheInput) {
  // Were the 20,000 lines kept, as text, ids and translations, they would take over 4 MiB, every
  // time; what a window leaves to the allocator varies by less, mostly.
  long grown = std::numeric_limits<long>::max();
  for (int i = 0; i < 3 && grown >= 3000; ++i) {
    const long some = peak_memory(4000);
    grown = std::min(grown, peak_memory(24000) - some);
  }
  EXPECT_LT(grown, 3000) << "KiB";
}

TEST_F(NmtTextTest, BatchesDoNotChangeTranslations) {
  const Ended whole = shell(nmt("translate < ") + path("valid.en"));
  EXPECT_EQ(lines_of(whole.output).size(), 40U);
  for (const char* flags : {"--mini-batch 1 --maxi-batch 1", "--mini-batch 3 --maxi-batch 2",
                            "--mini-batch-words 20", "--mini-batch 3 --cpu-threads 3"}) {
    EXPECT_EQ(shell(nmt(std::string("translate ") + flags + " < ") + path("valid.en")).output,
              whole.output)
        << flags;
  }
}

TEST_F(NmtTextTest, AShortlistIsLearntAndUsed) {
  const std::string file = path("run.shortlist");
  std::ofstream(file + ".tokens") << "a user's own\n";
  const Ended made =
      shell(bin("cohort-nmt") + " shortlist --model-dir " + path("run") + " --train-sets " +
            path("train.en") + " " + path("train.xx") + " --output " + file);
  ASSERT_EQ(made.code, 0) << made.output;
  EXPECT_EQ(contents(file + ".tokens"), "a user's own\n");
  for (const auto& entry : std::filesystem::directory_iterator(path(""))) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(!name.starts_with("run.shortlist.") || name == "run.shortlist.tokens") << name;
  }
  const auto translated = [&](const std::string& flags) {
    const Ended ended = shell(nmt("translate " + flags + " < ") + path("valid.en"));
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  const std::string all = translated("");
  // 60 pieces and 100 first: all that occur.
  EXPECT_EQ(translated("--shortlist " + file), all);
  const std::string few = translated("--shortlist " + file + " 1 1");
  EXPECT_EQ(lines_of(few).size(), 40U);
  EXPECT_NE(few, all);
  for (const char* flags : {"--mini-batch 1 --maxi-batch 1", "--mini-batch 3 --cpu-threads 3"})
    EXPECT_EQ(translated("--shortlist " + file + " 1 1 0 " + flags), few) << flags;
  // On any number of ranks.
  const std::string evaluate = nmt("evaluate --test-sets " + valid() + " --shortlist " + file +
                                   " 1 1 --output " + path("translated"));
  for (const int ranks : {1, 2, 3}) {
    const Ended ended =
        shell(bin("cohort") + " run --nproc-per-node " + std::to_string(ranks) + " -- " + evaluate);
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_EQ(contents(path("translated")), few) << ranks;
  }
  const std::string model = " --model-dir " + path("run");
  // A file with fewer pieces than BEST's default.
  const std::string small = path("small.shortlist");
  ASSERT_EQ(shell(bin("cohort-nmt") + " shortlist --model-dir " + path("run") + " --train-sets " +
                  path("train.en") + " " + path("train.xx") + " --best 1 --output " + small)
                .code,
            0);
  EXPECT_EQ(translated("--shortlist " + small + " 1"), few);
  expect_refused("translate" + model + " --shortlist " + small + " 1 2 < /dev/null",
                 "expected BEST to be at most 1");
  expect_refused("translate" + model + " --shortlist " + path("valid.en") + " < /dev/null",
                 "valid.en");
  expect_refused("translate" + model + " --shortlist " + file + " 100 x < /dev/null",
                 "--shortlist: x: expected a whole number");
  expect_refused("translate" + model + " --shortlist " + file + " 9 9 2 < /dev/null",
                 "--shortlist: 2: expected a probability");
  expect_refused("translate" + model + " --shortlist " + file + " --sampling < " + path("valid.en"),
                 "--shortlist: expected no --sampling");
  expect_refused("translate" + model + " --vocabs " + path("run") + "/source.spm " + path("run") +
                     "/source.spm --shortlist " + file + " < /dev/null",
                 "expected a shortlist made for the vocabulary");
  expect_refused("translate" + model + " --shortlist " + file + " 9 201 < /dev/null",
                 "run.shortlist: expected BEST to be at most 200, which were kept of each source "
                 "piece (cohort nmt shortlist --best), got 201");
  expect_refused("score" + model + " --shortlist " + file, "--shortlist");
  for (const std::string flag : {"--rounds", "--workspace"})
    expect_refused("shortlist" + model + " --output " + path("x") + " --lexical-table " + file +
                       " " + flag + " 3",
                   flag + " requires --train-sets");
  expect_refused("shortlist" + model + " --output " + path("x"),
                 "expected either --train-sets or --lexical-table");
}

TEST_F(NmtTextTest, SamplesDependOnTheSeedAndTheLineAlone) {
  const auto sampled = [&](const std::string& flags) {
    const Ended ended = shell(nmt("translate --sampling " + flags + " < ") + path("valid.en"));
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  const std::string one = sampled("--seed 3");
  EXPECT_EQ(lines_of(one).size(), 40U);
  EXPECT_EQ(sampled("--seed 3 --mini-batch 1 --maxi-batch 1"), one);
  EXPECT_NE(sampled("--seed 4"), one);
  EXPECT_NE(shell(nmt("translate < ") + path("valid.en")).output, one);

  const std::string three = sampled("--seed 3 --n-best --beam-size 3");
  const auto lines = lines_of(three);
  ASSERT_EQ(lines.size(), 120U);
  for (size_t i = 0; i < lines.size(); ++i)
    EXPECT_TRUE(lines[i].starts_with(std::to_string(i / 3) + " ||| ")) << lines[i];
  EXPECT_EQ(sampled("--seed 3 --n-best --beam-size 3 --mini-batch 1 --maxi-batch 1"), three);
}

TEST_F(NmtTextTest, AReaderThatLeavesEndsTheStreamQuietly) {
  const Ended ended =
      shell("bash -c 'yes red cat | " + nmt("translate --mini-batch 8 --maxi-batch 1") +
            " | head -1 > /dev/null; echo ${PIPESTATUS[1]}'");
  EXPECT_EQ(ended.output, "141\n") << "ended by SIGPIPE, without a message";
}

TEST_F(NmtTextTest, ABadLineIsNamedAfterTheTranslationsBeforeIt) {
  const auto expect_two_then = [&](const std::string& line, const std::string& flags,
                                   const std::string& error) {
    std::ofstream(path("lines")) << "red cat\nblue dog\n" << line << "\nred\n";
    const Ended ended =
        shell(nmt("translate " + flags + " 2> " + path("errors") + " < ") + path("lines"));
    const std::string errors = contents(path("errors"));
    EXPECT_EQ(ended.code, 2) << errors;
    EXPECT_EQ(lines_of(ended.output).size(), 2U) << ended.output;
    EXPECT_EQ(lines_of(errors).size(), 1U) << errors;
    EXPECT_NE(errors.find(error), std::string::npos) << errors;
  };
  expect_two_then("\xff\xfe", "", "standard input: line 3 is not valid UTF-8");
  std::string words;
  for (int i = 0; i < 6000; ++i) words += "red ";
  expect_two_then(words, "", "tokens: expected at most 4999 (--max-length-crop cuts longer ones)");
  std::ofstream(path("lines")) << words << "\nred\n";
  const Ended cropped = shell(
      nmt("translate --max-length-crop --beam-size 1 --max-output-length 5 < ") + path("lines"));
  EXPECT_EQ(cropped.code, 0) << cropped.output;
  EXPECT_EQ(lines_of(cropped.output).size(), 2U) << cropped.output;
  const Ended endless = shell("head -c 40000000 /dev/zero | tr '\\0' x | " + nmt("translate"));
  EXPECT_EQ(endless.code, 2);
  EXPECT_NE(endless.output.find("line 1 has more than 16 MiB"), std::string::npos)
      << endless.output;
}

}  // namespace nmt_text_test
