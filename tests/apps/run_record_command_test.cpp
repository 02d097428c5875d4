// SPDX-License-Identifier: Apache-2.0
// What a run shows: its record, its page and its last lines, with real processes on 2 ranks.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace cohort {
namespace run_record_command_test {

namespace fs = std::filesystem;
using nlohmann::json;
using test::bin;
using test::Ended;
using test::shell;

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

class RunRecordCommandTest : public testing::Test {
 protected:
  RunRecordCommandTest() {
    std::string pairs;
    const std::vector<std::string> source = {"red", "green", "blue", "one", "two", "cat", "dog"};
    const std::vector<std::string> target = {"rot",  "gruen", "blau", "eins",
                                             "zwei", "Katze", "Hund"};
    for (size_t i = 0; i < 200; ++i) {
      const size_t a = i % 7, b = i / 7 % 7;
      pairs += source[a] + " " + source[b] + "\t" + target[a] + " " + target[b] + "\n";
    }
    write_file(folder_ / "pairs.tsv", pairs);
  }
  std::string train(const std::string& flags) const {
    return bin("cohort") + " run --nproc-per-node 2 -- " + bin("cohort-nmt") +
           " train --train-sets " + (folder_ / "pairs.tsv") + " --valid-sets " +
           (folder_ / "pairs.tsv") + " --model-dir " + (folder_ / "run") +
           " --preset tiny --dim-emb 32 --transformer-dim-ffn 64 --enc-depth 1 --dec-depth 1 "
           "--dim-vocabs 40 40 --mini-batch 10 --learn-rate 5e-3 --lr-warmup 20 --tokenize 13a " +
           flags;
  }
  std::vector<json> history() const {
    std::vector<json> found;
    std::istringstream file(read_file(folder_ / "run/history.jsonl"));
    for (std::string line; std::getline(file, line);) found.push_back(json::parse(line));
    return found;
  }

  TemporaryFolder folder_;
};

TEST_F(RunRecordCommandTest, ARunOnTwoRanksLeavesItsRecordAndItsPage) {
  const std::string gpus = "LD_LIBRARY_PATH=" + bin("../tests/fake_nvml") + " ";
  const Ended first = shell(gpus + train("--after-epochs 2 --disp-freq 4u --quiet"));
  ASSERT_EQ(first.code, 0) << first.output;
  EXPECT_EQ(first.output.find("report: "), std::string::npos) << "--quiet: " << first.output;
  EXPECT_EQ(first.output.find("validation "), std::string::npos) << "--quiet: " << first.output;
  EXPECT_EQ(first.output.find("trained "), std::string::npos) << "--quiet: " << first.output;
  EXPECT_EQ(first.output.find("best by "), std::string::npos) << "--quiet: " << first.output;
  EXPECT_EQ(count(first.output, " gpu host_of_rank=0 gpu=0 busy_percent=87 "), 2) << first.output;
  EXPECT_EQ(count(first.output, " seconds training="), 2) << first.output;
  const Ended second = shell(gpus + train("--after-epochs 3 --disp-freq 4u --quiet"));
  ASSERT_EQ(second.code, 0) << second.output;
  std::map<std::string, int> types;
  int64_t update = 0;
  for (const json& line : history()) {
    ++types[line["type"].get<std::string>()];
    EXPECT_GE(line["update"].get<int64_t>(), update);
    update = line["update"].get<int64_t>();
    if (line["type"] == "train") {
      EXPECT_GT(line["loss"].get<double>(), 0);
      EXPECT_GT(line["gradient_norm"].get<double>(), 0);
      EXPECT_EQ(line["rank_tokens_per_s"].size(), 2);
      EXPECT_EQ(line["gpu_percent"], json::parse("[87.0,null]"));
    }
    if (line["type"] == "valid") {
      EXPECT_EQ(line["gpu_percent_peak"], json::parse("[87.0,null]"));
      EXPECT_EQ(line["gpu_memory_gib"], json::parse("[12.0,null]"));
    }
    if (line["type"] == "start") {
      EXPECT_EQ(line["hosts"].size(), 2);
      EXPECT_EQ(line["gpus"], json::parse(R"(["NVIDIA Fake 80GB", "NVIDIA Mute"])"))
          << "once a host";
      EXPECT_EQ(line["gpu_hosts"][0], line["hosts"][0]);
      EXPECT_EQ(line["gpu_total_gib"], json::parse("[80.0,null]"));
    }
  }
  // 10 updates an epoch: lines after 4, 8 and at the end of the first one, and so on.
  EXPECT_EQ(types,
            (std::map<std::string, int>{{"start", 2}, {"train", 9}, {"valid", 3}, {"end", 2}}))
      << read_file(folder_ / "run/history.jsonl");
  const std::string page = read_file(folder_ / "run/report.html");
  for (const char* shown :
       {"GPUs busy", "Speed by rank",
        "<td>NVIDIA Fake 80GB</td><td>80</td><td>12 / 12</td><td>87 / 87</td>",
        "Translations over time", "reached --after-epochs 3", "started again"}) {
    EXPECT_NE(page.find(shown), std::string::npos) << shown;
  }
  fs::remove(folder_ / "run/report.html");
  const Ended again = shell(bin("cohort") + " nmt report --model-dir " + (folder_ / "run"));
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_EQ(again.output, folder_ / "run/report.html" + "\n");
  EXPECT_EQ(read_file(folder_ / "run/report.html"), page) << "the record holds all of it";
  const Ended nowhere = shell(bin("cohort") + " nmt report --model-dir " + (folder_ / "nowhere"));
  EXPECT_EQ(nowhere.code, 2) << nowhere.output;
  EXPECT_EQ(count(nowhere.output, "\n"), 1) << nowhere.output;
}

TEST_F(RunRecordCommandTest, TheLastLinesAreCurvesOnATerminalAndPlainElsewhere) {
  const Ended plain = shell("LC_ALL=C.UTF-8 " + train("--after-epochs 3"));
  ASSERT_EQ(plain.code, 0) << plain.output;
  for (const char* line : {"trained 3 epochs, 30 updates: reached --after-epochs 3\n", "best by "})
    EXPECT_NE(plain.output.find(line), std::string::npos) << plain.output;
  EXPECT_NE(plain.output.find("\nloss, validation  "), std::string::npos) << plain.output;
  EXPECT_NE(plain.output.find("report: " + (folder_ / "run/report.html")), std::string::npos);
  EXPECT_EQ(plain.output.find("\xE2\x96"), std::string::npos) << "no block characters in a pipe";
  EXPECT_EQ(plain.output.find('\x1b'), std::string::npos);
  for (const auto& [locale, blocks] : {std::pair{"C.UTF-8", true}, {"C", false}}) {
    const Ended ended = shell(std::string("LC_ALL=") + locale + " TERM=xterm script -qec '" +
                              train("--after-epochs 4 --overwrite") + "' /dev/null");
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("\nvalidation "), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find(" | 1 "), std::string::npos) << ended.output;
    EXPECT_GT(count(ended.output, " loss "), 2) << ended.output;
    const size_t summary = ended.output.find("loss, training");
    ASSERT_NE(summary, std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("\xE2\x96\x88", summary) != std::string::npos, blocks)
        << ended.output;
    EXPECT_EQ(ended.output.find('#', summary) != std::string::npos, !blocks) << ended.output;
  }
}

TEST_F(RunRecordCommandTest, TheLogLevelDecidesWhatIsSaid) {
  const Ended warn = shell(train("--after-epochs 1 --quiet --log-level warn"));
  ASSERT_EQ(warn.code, 0) << warn.output;
  EXPECT_EQ(warn.output.find(" info "), std::string::npos) << warn.output;
  const Ended bad = shell(bin("cohort-nmt") +
                          " train --train-sets x --valid-sets x --model-dir x "
                          "--log-level loud");
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.output.find("--log-level loud: expected debug, info, warn or error"),
            std::string::npos)
      << bad.output;
  const Ended often = shell(bin("cohort-nmt") +
                            " train --train-sets x --valid-sets x --model-dir x "
                            "--disp-freq 5");
  EXPECT_EQ(often.code, 2);
  EXPECT_NE(often.output.find("--disp-freq 5: expected a number with its unit"), std::string::npos)
      << often.output;
}

}  // namespace run_record_command_test
}  // namespace cohort
