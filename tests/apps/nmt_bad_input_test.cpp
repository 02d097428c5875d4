// SPDX-License-Identifier: Apache-2.0
// What a user can get wrong, flag by flag and file by file: one line that names it, exit code 2,
// nothing half-written. And a disk that fills up while training saves.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/apps/nmt_command.h"
#include "tests/support/shell.h"

namespace nmt_bad_input_test {

namespace fs = std::filesystem;
using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::fields_of;
using cohort::test::shell;

class NmtBadInputTest : public cohort::test::NmtCommand {
 protected:
  void train_run() const {
    const Ended trained = shell(bin("cohort-nmt") + " " + train_flags("run") + "--after-batches 4");
    ASSERT_EQ(trained.code, 0) << trained.output;
  }
  std::string weights(const std::string& run) const {
    return path(run + "/best/weights-4.safetensors");
  }
  std::string manifest(const std::string& run) const { return path(run + "/best/manifest.json"); }
  // A damaged copy of the run is refused with a line that names `text`.
  template <class Damage>
  void expect_damage_named(Damage damage, const std::string& text) const {
    fs::remove_all(path("hurt"));
    fs::copy(path("run"), path("hurt"), fs::copy_options::recursive);
    damage();
    expect_refused("translate --model-dir " + path("hurt"), text);
  }
  static void flip_byte(const std::string& file, int64_t at) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char byte = static_cast<char>(stream.get());
    stream.seekp(at);
    stream.put(static_cast<char>(byte ^ 0x41));
  }
  static void replace_in(const std::string& file, const std::string& from, const std::string& to) {
    std::string text = contents(file);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::ofstream(file) << text.replace(at, from.size(), to);
  }
};

TEST_F(NmtBadInputTest, EveryFlagRefusesWhatIsNoneOfItsValues) {
  const std::set<std::string> any_text = {"TEXT", "FILE", "FOLDER", "HOST", "NAME", "URL", "FREQ"};
  std::istringstream list(shell(bin("cohort-nmt") + " __flags").output);
  int tried = 0;
  for (std::string line; std::getline(list, line);) {
    const auto fields = fields_of(line);
    ASSERT_EQ(fields.size(), 7U) << line;
    if (fields[0] != "flag" || fields[3] == "0" || any_text.contains(fields[4])) continue;
    // Flags that several commands share are the same code.
    static std::set<std::string> done;
    if (!done.insert(fields[2] + fields[4]).second) continue;
    const std::string command = fields[1].substr(fields[1].find(' ') + 1);
    const std::string name = fields[2].substr(fields[2].rfind(',') + 1);
    const std::string values = fields[3] == "2" ? " bad bad" : " bad";
    expect_refused(command + " " + name + values, name.substr(2));
    ++tried;
  }
  EXPECT_GT(tried, 40);
}

TEST_F(NmtBadInputTest, NumbersOutOfRangeAndFlagsAtOddsAreNamed) {
  const std::string flags = train_flags("bad");
  for (const char* flag :
       {"--mini-batch 1.5", "--maxi-batch 0", "--lr-warmup 0", "--optimizer-delay 0",
        "--exponential-smoothing 0.9", "--after-epochs -1", "--noam-factor 2", "--cpu-threads -1",
        "--timeout 0", "--max-length 0", "--beam-size 0", "--disp-freq 0s", "--valid-freq 1.5u",
        "--dist-url x", "--world-size 0", "--enc-depth 1000000000", "--dim-emb 100000000000"}) {
    const std::string text = flag;
    expect_refused(flags + text, text.substr(0, text.find(' ')));
  }
  EXPECT_FALSE(fs::exists(path("bad"))) << "nothing half-written";
  expect_refused("translate --model-dir --n-best", "--model-dir");
  expect_refused("translate --model-dir a b", "b");
  expect_refused("", "no command: expected prepare, train, ");
  expect_refused("train", "--train-sets is required (cohort nmt train --help lists flags)");
  expect_refused("bleu " + path("valid.xx") + " -ci -sl", "--confidence");
}

TEST_F(NmtBadInputTest, FilesThatAreNotWhatIsExpectedAreNamed) {
  train_run();
  const std::string model = " --model-dir " + path("run");
  const std::string en = path("valid.en");
  std::ofstream(path("empty")).close();
  for (const char* command : {"evaluate", "score"}) {
    const auto refused = [&](const std::string& sets, const std::string& text) {
      expect_refused(command + model + " --test-sets " + sets, text);
    };
    refused(path("none.tsv"), "none.tsv: cannot be read: No such file");
    refused(en + " " + path("none"), "none: cannot be read: No such file");
    refused(en + " " + folder_.string(), "cannot be read: Is a directory");
    refused(en + " " + path("train.xx"), "train.xx");  // another length
    refused(en, "valid.en: expected a .tsv");
    refused(en + " " + weights("run"), "weights-4.safetensors");  // no text
  }
  expect_refused("evaluate" + model + " --test-sets " + path("empty") + " " + path("empty"),
                 "no sentence pair in it");
  const std::string sets = " --test-sets " + en + " " + path("valid.xx");
  expect_refused("evaluate" + model + sets + " --output " + en + "/x",
                 "valid.en/x: expected a path");
  expect_refused("evaluate" + model + sets + " --output " + folder_.string(), "Is a directory");
  expect_refused("translate --model-dir " + en, "valid.en/best/manifest.json: no checkpoint here");
  expect_refused("average --model-dir " + path("none") + " --output x", "none/checkpoints");
  expect_refused("bleu " + path("train.xx") + " -i " + path("valid.xx"), "has 300 references but");
  expect_refused("bleu " + folder_.string() + " -i " + path("valid.xx"), "Is a directory");
  for (const std::string& folder : {en, en + "/run"}) {
    std::string flags = train_flags("x");
    flags.replace(flags.find(path("x")), path("x").size(), folder);
    expect_refused(flags + "--after-batches 1", folder);
  }
}

TEST_F(NmtBadInputTest, ADamagedModelIsNamed) {
  train_run();
  const std::string w = "weights-4.safetensors";
  const auto size = static_cast<int64_t>(fs::file_size(weights("run")));
  for (const int64_t kept : {int64_t{0}, int64_t{4}, int64_t{300}, size - 1})
    expect_damage_named([&] { fs::resize_file(weights("hurt"), static_cast<size_t>(kept)); }, w);
  for (const int64_t at : {int64_t{3}, int64_t{60}, size / 2, size - 1})
    expect_damage_named([&] { flip_byte(weights("hurt"), at); }, w);
  expect_damage_named([&] { fs::remove(weights("hurt")); }, w);

  const std::string m = "manifest.json";
  for (const size_t kept : {size_t{0}, size_t{100}})
    expect_damage_named([&] { fs::resize_file(manifest("hurt"), kept); }, m);
  expect_damage_named(
      [&] {
        fs::remove(manifest("hurt"));
        fs::create_directory(manifest("hurt"));
      },
      m);
  const auto facts = nlohmann::json::parse(contents(manifest("run")))["facts"];
  const auto with_fact = [&](const std::string& name, const std::string& value) {
    return [=, this] {
      std::string text = contents(manifest("hurt"));
      text.erase(text.rfind(",\n  \"sha256\""));  // of the text before it
      std::ofstream(manifest("hurt")) << text << "\n}\n";
      replace_in(manifest("hurt"), "\"" + name + "\": \"" + facts[name].get<std::string>() + "\"",
                 "\"" + name + "\": " + value);
    };
  };
  expect_damage_named(with_fact("model.heads", "\"x\""), "model.heads");
  expect_damage_named(with_fact("model.heads", "4"), "model.heads");
  expect_damage_named(with_fact("model.enc_depth", "\"2\""), "it has no ");
  expect_damage_named(with_fact("model.dim_ffn", "\"128\""), w);
  expect_damage_named(with_fact("model.dim_emb", "\"99999999999\""), "99999999999");
  expect_damage_named(with_fact("model.max_positions", "\"99999999999\""), "model.max_positions");

  for (const char* spm : {"source.spm", "target.spm"}) {
    const std::string file = path(std::string("hurt/") + spm);
    expect_damage_named([&] { fs::remove(file); }, spm);
    expect_damage_named([&] { fs::resize_file(file, 0); }, spm);
    expect_damage_named([&] { fs::resize_file(file, fs::file_size(file) - 5); }, spm);
    expect_damage_named([&] { flip_byte(file, 100); }, spm);
  }
}

// Runs `script` where `disk` is a file system of its own, of 2 MiB.
Ended with_small_disk(const std::string& disk, const std::string& script) {
  return shell("unshare -m sh -c 'mount -t tmpfs -o size=2m none " + disk + " && { " + script +
               "; }'");
}

// It would train for hours, and have nothing to resume from.
TEST_F(NmtBadInputTest, ARunThatCannotSaveDoesNotBegin) {
  fs::create_directory(path("disk"));
  const std::string nmt = bin("cohort-nmt") + " " + train_flags("disk/run") + "--after-batches 4 ";
  for (const std::string& train :
       {nmt, bin("cohort") + " run --servers 1 --trainers 2 -- " + nmt + "--strategy ps-sync",
        bin("cohort") + " run --servers 1 --trainers 2 -- " + nmt + "--strategy ps-async"}) {
    const Ended ended = with_small_disk(
        path("disk"), "dd if=/dev/zero of=" + path("disk/fill") +
                          " bs=1k count=1800 2> /dev/null; " + train + "; echo first $?; cat " +
                          path("disk/run/history.jsonl") + "; rm " + path("disk/fill") + "; " +
                          train + " > /dev/null 2>&1; echo second $?");
    EXPECT_NE(ended.output.find("No space left on device"), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("first 1\n"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("\"train\""), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("second 0\n"), std::string::npos) << ended.output;
  }
}

TEST_F(NmtBadInputTest, AFullDiskCostsNoCheckpoint) {
  fs::create_directory(path("disk"));
  const std::string train = bin("cohort-nmt") + " " + train_flags("disk/run");
  const std::string update =
      "grep -o \"\\\"update\\\": \\\"[0-9]*\" " + path("disk/run/last/manifest.json");
  // Room for the record of the run, none for its weights.
  const Ended ended = with_small_disk(
      path("disk"),
      train + "--after-batches 4 > /dev/null 2>&1; echo first $?; dd if=/dev/zero of=" +
          path("disk/fill") + " bs=1k 2> /dev/null; truncate -s -80k " + path("disk/fill") + "; " +
          train + "--after-batches 40 --save-freq 0.0001; echo second $?; " + update +
          "; echo red | " + bin("cohort-nmt") + " translate --model-dir " + path("disk/run") +
          " > /dev/null; echo translated $?; rm " + path("disk/fill") + "; " + train +
          "--after-batches 8 > /dev/null 2>&1; echo third $?; " + update + "; " +
          // best/ is of the validation that last/ takes for the best
          "digits() { grep -o \"$1\\\": \\\"[0-9]*\" " + path("disk/run") +
          "/$2/manifest.json | grep -o \"[0-9]*$\"; }; test $(digits best_update last) = "
          "$(digits update best | tail -1); echo best $?");
  const auto has = [&](const std::string& text) {
    EXPECT_NE(ended.output.find(text), std::string::npos) << text << "\nin " << ended.output;
  };
  has("first 0\n");
  has("a checkpoint was not written");  // reported, and training continued
  has("second 1\n\"update\": \"4\n");   // the last one ends the run: the earlier one is there
  has("cannot write: No space left on device\n");
  has("translated 0\n");
  has("third 0\n\"update\": \"8\n");
  has("best 0\n");
}

}  // namespace nmt_bad_input_test
