// SPDX-License-Identifier: Apache-2.0
// What the translator's commands do with training text, as a user runs them.
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <sys/stat.h>

#include "tests/apps/nmt_command.h"

namespace nmt_data_test {

namespace fs = std::filesystem;
using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::shell;

class NmtDataTest : public cohort::test::NmtCommand {
 protected:
  std::string nmt(const std::string& flags) const { return bin("cohort-nmt") + " " + flags; }

  std::string prepare_flags(const std::string& model_dir) const {
    return "prepare --train-sets " + path("train.en") + " " + path("train.xx") + " --model-dir " +
           path(model_dir) + " --dim-vocabs 60 60 ";
  }

  void add_pair(const std::string& source, const std::string& target) const {
    std::ofstream(path("train.en"), std::ios::app) << source << "\n";
    std::ofstream(path("train.xx"), std::ios::app) << target << "\n";
  }

  // The files of last/ of a run, with their checksums: weights, moments, averages.
  nlohmann::json saved(const std::string& run) const {
    return nlohmann::json::parse(contents(path(run + "/last/manifest.json")))["files"];
  }
};

void expect_in(const std::string& text, const Ended& ended) {
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find(text), std::string::npos) << "expected: " << text << "\n"
                                                        << ended.output;
}

TEST_F(NmtDataTest, WhatWasPreparedIsUsedAndTrainsTheSameModel) {
  ASSERT_EQ(shell(nmt(train_flags("plain") + "--after-epochs 2")).code, 0);
  const Ended prepared = shell(nmt(prepare_flags("p")));
  expect_in("300 pairs read: 300 kept, 0 cropped, 0 dropped as too long, 0 as empty\n", prepared);
  expect_in("train-tokens.safetensors: built, after ", prepared);
  expect_in("train-tokens.safetensors: used, after ", shell(nmt(prepare_flags("p"))));
  const std::string vocabulary = contents(path("p/source.spm"));
  expect_in("token cache state=used ", shell(on_ranks(1, train_flags("p") + "--after-epochs 2")));
  EXPECT_EQ(contents(path("p/source.spm")), vocabulary);
  EXPECT_EQ(saved("p"), saved("plain"));
}

// Every character of a European text has a piece; of Chinese ones the rarest have none.
TEST_F(NmtDataTest, OneChineseCharacterDoesNotMakeATextChinese) {
  for (int i = 0; i < 1000; ++i) add_pair("red green blue", "der neerg eulb");
  add_pair("caf\u00E9 \u732B", "\u00E9fac");
  ASSERT_EQ(shell(nmt(prepare_flags("p"))).code, 0);
  const std::string pieces = contents(path("p/source.spm"));
  EXPECT_NE(pieces.find("\u00E9"), std::string::npos) << "one of some 20,000 characters";
  EXPECT_NE(pieces.find("\u732B"), std::string::npos);
  for (int i = 0; i < 100; ++i) add_pair("\u7EA2\u732B", "\u732B");
  ASSERT_EQ(shell(nmt(prepare_flags("q"))).code, 0);
  EXPECT_EQ(contents(path("q/source.spm")).find("\u00E9"), std::string::npos);
}

TEST_F(NmtDataTest, EveryPairIsAccountedFor) {
  add_pair("", "red");
  add_pair("sun moon sun moon sun moon sun moon sun moon", "nus");
  const std::string flags = train_flags("c") + "--max-length 8 --after-batches 1 ";
  expect_in("dropped_empty=1 dropped_long=", shell(nmt(flags)));
  const auto counts = [&](const char* run) {
    return nlohmann::json::parse(contents(path(std::string(run) + "/config.json")))["train_pairs"];
  };
  const auto sum = [](const nlohmann::json& c) {
    return c["kept"].get<int>() + c["cropped"].get<int>() + c["dropped_long"].get<int>() +
           c["dropped_empty"].get<int>();
  };
  const auto dropped = counts("c");
  EXPECT_EQ(dropped["read"], 302);
  EXPECT_EQ(sum(dropped), 302) << dropped;
  EXPECT_GT(dropped["dropped_long"], 0);
  EXPECT_EQ(dropped["cropped"], 0);
  ASSERT_EQ(shell(nmt(flags + "--overwrite --max-length-crop")).code, 0);
  const auto cropped = counts("c");
  EXPECT_EQ(sum(cropped), 302) << cropped;
  EXPECT_EQ(cropped["cropped"], dropped["dropped_long"]);
  EXPECT_EQ(cropped["dropped_long"], 0);
  const auto start = nlohmann::json::parse(
      contents(path("c/history.jsonl")).substr(0, contents(path("c/history.jsonl")).find('\n')));
  EXPECT_EQ(start["pairs_read"], 302) << start;
}

TEST_F(NmtDataTest, ABadCacheIsSaidToBeSoAndMadeAnew) {
  const std::string flags = train_flags("b") + "--after-batches ";
  ASSERT_EQ(shell(nmt(flags + "2")).code, 0);
  const fs::path cache = path("b/train-tokens.safetensors");
  {
    std::fstream file(cache, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put('!');
  }
  const Ended flipped = shell(on_ranks(2, flags + "3"));
  expect_in(
      "warn token cache state=\"built: the one there was damaged: the checksum of ids is wrong\"",
      flipped);
  fs::resize_file(cache, fs::file_size(cache) / 2);
  expect_in("built: the one there was damaged: ", shell(nmt(flags + "4")));
  expect_in("token cache state=used ", shell(nmt(flags + "5")));
  // Text that changed belongs to another run.
  add_pair("red", "der");
  expect_refused(flags + "6", "holds a run with another text of --train-sets: train_sets_sha256 ");
  expect_in("state=\"built: the one there was stale: ",
            shell(nmt(flags + "2 --overwrite --max-length 7")));
}

TEST_F(NmtDataTest, RunsShareACacheFolder) {
  const std::string flags = "--after-batches 1 --cache-dir " + path("cache") + " --vocabs ";
  ASSERT_EQ(shell(nmt(prepare_flags("v"))).code, 0);
  const std::string vocabs = path("v/source.spm") + " " + path("v/target.spm");
  expect_in("token cache state=built ", shell(nmt(train_flags("one") + flags + vocabs)));
  expect_in("token cache state=used ", shell(nmt(train_flags("two") + flags + vocabs)));
  EXPECT_FALSE(fs::exists(path("two/train-tokens.safetensors")));
  std::string other = train_flags("three") + "--vocabs " + vocabs;
  expect_refused(other.replace(other.find("60 60"), 5, "60 70"),
                 path("v/target.spm") + " has 60 pieces: expected 70 (--dim-vocabs)");
  expect_refused(
      train_flags("three") + "--cache-dir " + path("train.en/x"),
      path("train.en/x") +
          ": expected a folder in which the token cache can be written: Not a directory");
  // A folder that is there, and takes no files.
  for (const std::string& prefix : {train_flags("four"), prepare_flags("five")}) {
    expect_refused(prefix + "--cache-dir /proc/self --vocabs " + vocabs,
                   "/proc/self: expected a folder in which the token cache can be written: ");
  }
}

// A mistyped --vocabs must not pass unnoticed: it costs minutes, and then another vocabulary.
TEST_F(NmtDataTest, AVocabularyThatIsMissingIsAnnouncedBeforeItIsMade) {
  const auto line = [&](const std::string& name) {
    return "info training a new SentencePiece vocabulary of 60 pieces into " + path(name) +
           ": there is no such file\n";
  };
  const auto prepare = [&](const std::string& source, const std::string& target) {
    return shell(nmt(prepare_flags("p") + "--vocabs " + path(source) + " " + path(target)));
  };
  const Ended two = prepare("a.spm", "b.spm");
  expect_in(line("a.spm"), two);
  expect_in(line("b.spm"), two);
  EXPECT_LT(two.output.find(line("b.spm")), two.output.find("pairs read")) << two.output;
  const Ended one = prepare("a.spm", "c.spm");
  expect_in(line("c.spm"), one);
  EXPECT_EQ(one.output.find(line("a.spm")), std::string::npos) << one.output;
  const Ended joined = prepare("d.spm", "d.spm");
  expect_in(line("d.spm"), joined);
  EXPECT_EQ(joined.output.find(line("d.spm")), joined.output.rfind(line("d.spm")));
  const std::string none = path("none") + "/a.spm";
  const std::string refused = "--vocabs " + none + ": expected a folder that exists, got ";
  for (const std::string& flags : {train_flags("t"), prepare_flags("q")})
    expect_refused(flags + "--vocabs " + none + " " + path("b.spm"), refused + path("none"));
}

TEST_F(NmtDataTest, TheSizesOfVocabulariesThatExistNeedNotBeRepeated) {
  const std::string size = "--dim-vocabs 60 60 ";
  const auto without_size = [&](std::string flags) {
    return flags.erase(flags.find(size), size.size());
  };
  const auto recorded = [&](const std::string& run) {
    const auto config = nlohmann::json::parse(contents(path(run + "/config.json")));
    return std::pair{config["model.dim_vocab_source"], config["model.dim_vocab_target"]};
  };
  std::string flags = prepare_flags("v");
  ASSERT_EQ(shell(nmt(flags.replace(flags.find("60 60"), 5, "60 55"))).code, 0);
  const std::pair<nlohmann::json, nlohmann::json> own{"60", "55"};
  const std::string vocabs = "--vocabs " + path("v/source.spm") + " " + path("v/target.spm");
  expect_in("", shell(on_ranks(2, without_size(train_flags("t")) + "--after-batches 1 " + vocabs)));
  EXPECT_EQ(recorded("t"), own);
  expect_in("", shell(nmt(without_size(prepare_flags("p")) + vocabs)));
  // Those of the run's folder, as it was prepared, and as it resumes.
  for (const char* updates : {"1", "2"}) {
    expect_in("", shell(nmt(without_size(train_flags("v")) + "--after-batches " + updates)));
    EXPECT_EQ(recorded("v"), own);
  }
  expect_refused(train_flags("u") + vocabs,
                 path("v/target.spm") + " has 55 pieces: expected 60 (--dim-vocabs)");
}

TEST_F(NmtDataTest, TextFromAPipeIsRefusedByName) {
  ASSERT_EQ(::mkfifo(path("pipe.tsv").c_str(), 0600), 0);
  const std::string refused = path("pipe.tsv") + ": expected a regular file";
  // Nobody writes to it: who opened it would wait.
  const std::string text = "prepare --train-sets " + path("pipe.tsv") + " --dim-vocabs 60 60 ";
  expect_refused(text + "--model-dir " + path("p"), refused);
  ASSERT_EQ(shell(nmt(prepare_flags("v"))).code, 0);
  expect_refused(text + "--model-dir " + path("v"), refused);
  std::string flags = train_flags("t");
  flags.replace(flags.find(path("train.en")), path("train.en " + path("train.xx")).size(),
                path("pipe.tsv"));
  expect_refused(flags, refused);
}

TEST_F(NmtDataTest, AFittedRunStaysWithinTheWorkspaceAndGoesOnExactly) {
  std::string words, drows;  // More than one width is tried.
  for (int i = 0; i < 8; ++i) {
    words += "sun moon ";
    drows += "nus noom ";
  }
  add_pair(words, drows);
  const std::string flags = "--mini-batch-fit --workspace 2 --after-epochs 3 ";
  std::string fit_flags = train_flags("whole");
  fit_flags.replace(fit_flags.find("--mini-batch 16"), 15, flags);
  const Ended fitted = shell(on_ranks(2, fit_flags));
  std::istringstream lines(fitted.output);
  int num_fits = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("batch fits tokens_per_sentence=") == std::string::npos) continue;
    ++num_fits;
    const double mib = std::stod(line.substr(line.find(" mib=") + 5));
    EXPECT_GT(mib, 1.6) << line;
    EXPECT_LE(mib, 2) << line;
  }
  EXPECT_GE(num_fits, 2) << fitted.output;
  expect_in("batches updates_per_epoch=", fitted);
  const auto replaced = [&](const std::string& to) {
    std::string changed = fit_flags;
    changed.replace(changed.find(path("whole")), path("whole").size(), path(to));
    return changed;
  };
  expect_in("", shell(on_ranks(2, replaced("parts") + "--after-batches 4")));
  expect_in("resumed", shell(on_ranks(2, replaced("parts"))));
  EXPECT_EQ(saved("parts"), saved("whole"));

  std::string small = fit_flags;
  small.replace(small.find("--workspace 2"), 13, "--workspace 1 --preset base --dim-emb 512");
  small.replace(small.find("--preset tiny --dim-emb 32"), 26, "");
  small.replace(small.find(path("whole")), path("whole").size(), path("small"));
  expect_refused(small, "--workspace 1: one pair of ");
}

}  // namespace nmt_data_test
