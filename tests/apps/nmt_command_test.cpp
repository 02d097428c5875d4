// SPDX-License-Identifier: Apache-2.0
// The translator's commands as a user runs them: real processes, real files.
#include "tests/apps/nmt_command.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <signal.h>
#include <span>
#include <sstream>
#include <thread>

#include "cohort/base/checksum.h"
#include "cohort/base/safetensors.h"
#include "cohort/base/stored_checkpoint.h"

#include "tests/support/shell.h"

namespace nmt_command_test {

namespace fs = std::filesystem;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

using cohort::test::contents;
using cohort::test::workers_of;
class NmtCommandTest : public cohort::test::NmtCommand {};

TEST_F(NmtCommandTest, TwoRanksTrainBitEqualTwiceThenEvaluateAndTranslate) {
  for (const char* run : {"a", "b"}) {
    const Ended ended = shell(on_ranks(2, train_flags(run) + "--after-epochs 4 --seed 3"));
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("reached --after-epochs 4"), std::string::npos) << ended.output;
  }
  const auto manifest_a = nlohmann::json::parse(contents(path("a/best/manifest.json")));
  const auto manifest_b = nlohmann::json::parse(contents(path("b/best/manifest.json")));
  EXPECT_EQ(manifest_a["files"], manifest_b["files"]) << "equal seeds must give equal weights";
  std::istringstream history(contents(path("a/history.jsonl")));
  int lines = 0;
  double loss = 1e9;
  for (std::string line; std::getline(history, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row["type"] != "valid") continue;
    EXPECT_EQ(row["epoch"], ++lines);
    EXPECT_GT(row["valid_loss"].get<double>(), 0);
    EXPECT_LT(row["train_loss"].get<double>(), loss) << "training lowers its loss";
    loss = row["train_loss"].get<double>();
  }
  EXPECT_EQ(lines, 4);
  // What training said of its best model is what evaluation finds.
  const Ended again = shell(
      on_ranks(2, "evaluate --model-dir " + path("a") + " --test-sets " + path("valid.en") + " " +
                      path("valid.xx") + " --tokenize 13a --beam-size 1 --max-output-length 60"));
  const double evaluated = std::stod(again.output.substr(again.output.find(" = ") + 3));
  EXPECT_NEAR(evaluated, std::stod(manifest_a["facts"]["valid_bleu"].get<std::string>()), 0.05)
      << again.output;

  const auto scores = [](const std::string& text) { return text.substr(text.find("BLEU|")); };
  for (const std::string precision : {"float32", "auto"}) {
    const auto output = [&](int ranks) { return path(std::to_string(ranks) + "-" + precision); };
    const std::string evaluate = "evaluate --model-dir " + path("a") + " --test-sets " +
                                 path("valid.en") + " " + path("valid.xx") +
                                 " --tokenize 13a --precision " + precision + " --output ";
    const Ended one = shell(bin("cohort-nmt") + " " + evaluate + output(1));
    ASSERT_EQ(one.code, 0) << one.output;
    EXPECT_NE(one.output.find("copying the source would score "), std::string::npos);
    for (const int ranks : {2, 3}) {
      const Ended many = shell(on_ranks(ranks, evaluate + output(ranks)));
      EXPECT_EQ(many.code, 0) << many.output;
      EXPECT_EQ(scores(many.output), scores(one.output)) << ranks << precision;
      EXPECT_EQ(contents(output(ranks)), contents(output(1))) << ranks << precision;
    }
  }

  const Ended translated = shell(bin("cohort-nmt") + " translate --precision float32 --model-dir " +
                                 path("a") + " < " + path("valid.en"));
  EXPECT_EQ(translated.code, 0);
  EXPECT_EQ(translated.output, contents(path("1-float32"))) << "in order, the same as evaluate";
  const Ended n_best =
      shell("echo red cat | " + bin("cohort-nmt") +
            " translate --n-best --beam-size 3 --precision float32 --model-dir " + path("a"));
  EXPECT_EQ(std::count(n_best.output.begin(), n_best.output.end(), '\n'), 3) << n_best.output;
  EXPECT_EQ(n_best.output.find("0 ||| "), 0) << n_best.output;
  const Ended blank = shell("printf 'red cat\\n\\nblue dog\\n' | " + bin("cohort-nmt") +
                            " translate --model-dir " + path("a"));
  EXPECT_EQ(std::count(blank.output.begin(), blank.output.end(), '\n'), 3) << blank.output;
  EXPECT_NE(blank.output.find("\n\n"), std::string::npos) << "a blank line stays blank";
}

TEST_F(NmtCommandTest, ReadsTsvAndJson) {
  std::ofstream(path("pairs.tsv")) << "red cat\tder tac\nblue dog\teulb god\n";
  std::ofstream(path("pairs.json")) << R"([["red cat", "der tac"], ["", "x"], ["blue", "eulb"]])";
  std::string rest = train_flags("c").substr(train_flags("c").find(" --model-dir"));
  rest.replace(rest.find("60 60"), 5, "18 18");
  const Ended ended = shell(bin("cohort-nmt") + " train --train-sets " + path("pairs.json") +
                            " --valid-sets " + path("pairs.tsv") + rest + "--after-epochs 1");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("train_pairs=2 dropped_empty=1"), std::string::npos) << ended.output;
}

TEST_F(NmtCommandTest, BadInputIsOneLineThatNamesIt) {
  const std::string flags = train_flags("bad");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = flags;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  std::ofstream(path("short.xx")) << "a\nb\n";
  std::ofstream(path("broken.en")) << "fine\n\xff\xfe\n";
  std::ofstream(path("broken.xx")) << "a\nb\n";
  expect_refused(with(path("train.xx"), path("short.xx")), "300");
  expect_refused(
      with(path("train.en") + " " + path("train.xx"), path("broken.en") + " " + path("broken.xx")),
      "broken.en");
  expect_refused(with(path("train.en"), path("missing.en")), "missing.en");
  expect_refused(with("--dim-vocabs 60 60", "--dim-vocabs 6000 6000"), "6000");
  expect_refused(with("--dim-vocabs 60 60", "--dim-vocabs 60 6000"), "target vocabulary: ");
  const std::string joint = path("joint.spm");
  expect_refused(
      with("--dim-vocabs 60 60", "--dim-vocabs 60 70") + "--vocabs " + joint + " " + joint,
      "--dim-vocabs 60 70: expected the same number twice");
  expect_refused(flags + "--joined-dictionary --vocabs " + joint + " " + path("other.spm"),
                 "--joined-dictionary with --vocabs " + joint);
  expect_refused(flags + "--tied-embeddings-all",
                 "--tied-embeddings-all: expected one vocabulary for both sides");
  expect_refused(flags + "--transformer-postprocess n",
                 "--transformer-postprocess n: expected da or dan");
  expect_refused(flags + "--transformer-ffn-activation tanh", "expected relu, gelu or swish");
  expect_refused(flags + "--no-such-flag", "--no-such-flag");
  expect_refused(flags + "--precision float8",
                 "--precision float8: expected auto, bfloat16 or float32");
  expect_refused(flags + "--valid-freq 3", "--valid-freq 3");
  expect_refused(flags, "RANK is set but WORLD_SIZE is not", "RANK=0");
  const Ended lost = shell("env RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=9 " +
                           bin("cohort-nmt") + " " + flags + "--rendezvous-timeout 1");
  EXPECT_EQ(lost.code, 3) << lost.output;
  EXPECT_NE(lost.output.find("nobody answers there: Connection refused"), std::string::npos)
      << lost.output;
  EXPECT_EQ(std::count(lost.output.begin(), lost.output.end(), '\n'), 1) << lost.output;
  expect_refused("evaluate --model-dir " + path("nowhere") + " --test-sets " + path("valid.en") +
                     " " + path("valid.xx"),
                 "nowhere/best/manifest.json: no checkpoint here");
  std::string words;  // more tokens than the model has positions
  for (int i = 0; i < 6000; ++i) words += "red ";
  std::ofstream(path("long.en")) << words << "\n";
  std::ofstream(path("long.xx")) << "der\n";
  expect_refused(
      with(path("valid.en") + " " + path("valid.xx"), path("long.en") + " " + path("long.xx")),
      "--valid-sets: pair 1 has ");
  for (const char* number :
       {"--clip-norm nan", "--clip-norm -1", "--time-limit inf", "--seed -1",
        "--seed 99999999999999999999", "--learn-rate nan", "--normalize nan"}) {
    expect_refused(flags + number, std::string(number) + ": expected ");
  }
  EXPECT_TRUE(fs::is_empty(path("bad"))) << "nothing half-written";
  expect_refused("bogus", "bogus: there is no such flag or command");
  expect_refused(flags + "--bogus 3", "--bogus: there is no such flag or command");
  expect_refused(flags + "--device cuda", "CUDA cannot be used: ");
  expect_refused(flags + "--seed 1 --seed 2", "--seed: expected once, got 2 times");
  expect_refused(flags + "--seed", "--seed: expected a value");
}

TEST_F(NmtCommandTest, OneVocabularyServesBothSidesAndAllTables) {
  const std::string flags =
      "--tied-embeddings-all --transformer-postprocess dan "
      "--transformer-ffn-activation gelu ";
  const std::string joined = train_flags("joined") + flags + "--joined-dictionary ";
  const Ended ended = shell(on_ranks(2, joined + "--after-batches 4"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(contents(path("joined/source.spm")), contents(path("joined/target.spm")));
  const Ended on = shell(bin("cohort-nmt") + " " + joined + "--after-batches 6");
  EXPECT_EQ(on.code, 0) << on.output;
  EXPECT_EQ(
      shell("echo red cat | " + bin("cohort-nmt") + " translate --model-dir " + path("joined"))
          .code,
      0);
  // Marian's way to ask for one: the same file twice. It is the same vocabulary.
  const std::string file = path("both.spm");
  const Ended named = shell(bin("cohort-nmt") + " " + train_flags("named") + flags + "--vocabs " +
                            file + " " + file + " --after-batches 4");
  ASSERT_EQ(named.code, 0) << named.output;
  EXPECT_EQ(contents(file), contents(path("joined/source.spm")));
  EXPECT_EQ(contents(file), contents(path("named/target.spm")));
}

TEST_F(NmtCommandTest, GradientCheckpointingChangesNoWeight) {
  for (const char* flag : {"", "--gradient-checkpointing"}) {
    const std::string run = std::string("run") + flag;
    const Ended ended = shell(on_ranks(2, train_flags(run) + "--after-batches 6 " + flag));
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  const auto files = [&](const std::string& run) {
    return nlohmann::json::parse(contents(path(run + "/last/manifest.json")))["files"];
  };
  EXPECT_EQ(files("run"), files("run--gradient-checkpointing"));
}

TEST_F(NmtCommandTest, MomentsOnDiskChangeNoWeight) {
  for (const std::string& flag : {std::string(), "--optimizer-state-dir " + path("")}) {
    const Ended ended =
        shell(bin("cohort-nmt") + " " + train_flags(flag.empty() ? "memory" : "disk") +
              "--after-batches 6 " + flag);
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  const auto files = [&](const std::string& run) {
    return nlohmann::json::parse(contents(path(run + "/last/manifest.json")))["files"];
  };
  EXPECT_EQ(files("memory"), files("disk"));
  expect_refused(train_flags("x") + "--optimizer-state-dir " + path("absent"), path("absent"));
}

// One run that resumes under another strategy again and again, beside one under plain DDP.
TEST_F(NmtCommandTest, ARunGoesOnWithAnotherStrategy) {
  const std::string flags =
      "--precision float32 --exponential-smoothing 0.1 --save-interval-updates 4 --after-batches ";
  const auto run = [&](const std::string& name, int updates, const std::string& strategy) {
    const Ended ended = shell(on_ranks(
        2, train_flags(name) + flags + std::to_string(updates) + " --strategy " + strategy));
    ASSERT_EQ(ended.code, 0) << ended.output;
  };
  run("plain", 8, "ddp");
  run("r", 2, "zero3");
  run("r", 4, "zero1");
  run("r", 6, "fsdp");
  run("r", 8, "zero2");
  const auto loss = [&](const std::string& name) {  // of the last validation
    double last = 0;
    for (const std::string& line :
         cohort::test::lines_of(contents(path(name + "/history.jsonl")))) {
      const auto row = nlohmann::json::parse(line);
      if (row["type"] == "valid") last = row["valid_loss"].get<double>();
    }
    return last;
  };
  EXPECT_NEAR(loss("r"), loss("plain"), 1e-4) << "float32, summed in another order";
  for (const std::string checkpoint : {"r/last", "r/best", "r/checkpoints/4"}) {
    const Ended verified = shell(bin("cohort") + " checkpoint verify " + path(checkpoint));
    EXPECT_EQ(verified.code, 0) << checkpoint << ": " << verified.output;
  }
  const auto best = nlohmann::json::parse(contents(path("r/best/manifest.json")));
  ASSERT_EQ(best["files"].size(), 1) << "whole, though ranks wrote shares of it";
  EXPECT_TRUE(best["files"].contains("weights"));
  const Ended translated =
      shell(bin("cohort-nmt") + " translate --model-dir " + path("r") + " < " + path("valid.en"));
  EXPECT_EQ(translated.code, 0) << translated.output;
  const Ended exported = shell(bin("cohort-nmt") + " export --to ctranslate2 --model-dir " +
                               path("r") + " --output-dir " + path("exported"));
  EXPECT_EQ(exported.code, 0) << exported.output;
  expect_refused(train_flags("x") + "--strategy hybrid", "expected several hosts, got one");
}

TEST_F(NmtCommandTest, AManifestOfBeforeANewOptionMeansTheDefault) {
  const std::string train = train_flags("old");
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train + "--after-batches 2").code, 0);
  auto manifest = nlohmann::json::parse(contents(path("old/best/manifest.json")));
  for (const char* fact : {"model.norm", "model.ffn_activation", "model.tied_embeddings_all"})
    EXPECT_EQ(manifest["facts"].erase(fact), 1U) << fact;
  manifest.erase("sha256");
  std::ofstream(path("old/best/manifest.json")) << manifest.dump(2);
  EXPECT_EQ(
      shell("echo red cat | " + bin("cohort-nmt") + " translate --model-dir " + path("old")).code,
      0);
  expect_refused(train + "--after-batches 4 --transformer-postprocess dan",
                 "holds a run with model.norm da, now it is dan");
}

// What is in the folder is compared with CTranslate2 itself by tests/peers/nmt_parity.py.
TEST_F(NmtCommandTest, ExportWritesAWholeFolderOrNothing) {
  const auto to = [&](const std::string& run, const std::string& folder) {
    return "export --to ctranslate2 --model-dir " + path(run) + " --output-dir " + path(folder);
  };
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train_flags("run") + "--after-batches 2").code, 0);
  const auto listing = [&] {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.insert(entry.path().filename());
    return names;
  };
  // What is beside it is nobody's leftover.
  fs::create_directory(path("folder.new"));
  std::ofstream(path("folder.new/mine")) << "kept";
  auto before = listing();
  const Ended ended = shell(bin("cohort-nmt") + " " + to("run", "folder/"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("folder")))
    names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"config.json", "model.bin", "source.spm",
                                          "source_vocabulary.json", "target.spm",
                                          "target_vocabulary.json"}));
  EXPECT_EQ(contents(path("folder/target.spm")), contents(path("run/target.spm")));
  // CTranslate2's numbers of types, by the bytes of one element: float32 0, int8 1, int16 2.
  const std::map<int, int> bytes_of{{0, 4}, {1, 1}, {2, 2}};
  const std::string model = contents(path("folder/model.bin"));
  size_t at = 0;
  const auto number = [&](size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, model.data() + at, bytes);
    at += bytes;
    return value;
  };
  const auto skip_name = [&] { at += number(2); };
  EXPECT_EQ(number(4), 6U);
  skip_name();
  number(4);
  for (uint64_t left = number(4); left > 0; --left) {
    skip_name();
    uint64_t elements = 1;
    for (uint64_t dims = number(1); dims > 0; --dims) elements *= number(4);
    const int type = static_cast<int>(number(1));
    const uint64_t bytes = number(4);
    at += bytes;
    ASSERT_LT(at, model.size());
    ASSERT_TRUE(bytes_of.contains(type)) << type;
    EXPECT_EQ(bytes, elements * static_cast<uint64_t>(bytes_of.at(type))) << "type " << type;
  }
  EXPECT_EQ(contents(path("folder.new/mine")), "kept");
  EXPECT_EQ(fs::status(path("folder")).permissions(), fs::status(path("folder.new")).permissions());
  before.insert("folder");
  EXPECT_EQ(listing(), before);
  const std::string start("\x06\0\0\0\x10\0TransformerSpec\0\x07\0\0\0", 26);
  EXPECT_EQ(contents(path("folder/model.bin")).substr(0, start.size()), start);
  EXPECT_EQ(nlohmann::json::parse(contents(path("folder/source_vocabulary.json"))).size(), 60U);

  expect_refused(to("run", "folder"), "folder exists: expected the name of a new folder");
  expect_refused(to("run", "train.en/x"), "train.en/x cannot be made: ");
  expect_refused("export --to onnx --model-dir " + path("run") + " --output-dir " + path("x"),
                 "--to onnx: expected ctranslate2");
  fs::remove_all(path("run/best"));
  expect_refused(to("run", "x"), "run/best/manifest.json: no checkpoint here");
  EXPECT_EQ(listing(), before);
}

TEST_F(NmtCommandTest, AModelIsUsedWithItsOwnVocabulariesOnly) {
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train_flags("first") + "--after-batches 2").code, 0);
  const std::string vocabs = path("first/source.spm") + " " + path("first/target.spm");
  const std::string swapped = path("first/target.spm") + " " + path("first/source.spm");
  ASSERT_EQ(
      shell(bin("cohort-nmt") + " " + train_flags("own") + "--after-batches 2 --vocabs " + vocabs)
          .code,
      0);
  EXPECT_EQ(contents(path("own/source.spm")), contents(path("first/source.spm")))
      << "a run's folder holds all that its model needs";
  const std::string translate = "translate --model-dir " + path("own");
  EXPECT_EQ(shell("echo red | " + bin("cohort-nmt") + " " + translate).code, 0);
  expect_refused(translate + " --vocabs " + swapped,
                 "target.spm is not the source vocabulary that the model was trained with");
  expect_refused(translate + " < " + path("own"), "standard input: cannot be read");
}

TEST_F(NmtCommandTest, WhatIsNoRunsIsNotRemoved) {
  for (const std::string name :
       {"tensorboard/mine", "checkpoints/7/mine", "report.html/mine", "result-dev.txt"}) {
    const fs::path file = path("mine/" + name);
    fs::create_directories(file.parent_path());
    std::ofstream(file) << "mine";
    expect_refused(train_flags("mine") + "--after-batches 1", "which a run would replace");
    EXPECT_EQ(contents(file), "mine");
    fs::remove_all(path("mine"));
  }
}

TEST_F(NmtCommandTest, AnEarlierRunOutlivesARefusedOne) {
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train_flags("d") + "--after-epochs 1").code, 0);
  // What cannot be trained does not cost the earlier run.
  std::string too_many = train_flags("d");
  too_many.replace(too_many.find("60 60"), 5, "60 6000");
  expect_refused(too_many + "--overwrite", "target vocabulary: ");
  for (const char* kept : {"d/source.spm", "d/target.spm", "d/best", "d/history.jsonl"}) {
    EXPECT_TRUE(fs::exists(path(kept))) << kept;
  }
  fs::resize_file(path("d/last/manifest.json"), 0);  // As a power cut may leave it.
  expect_refused(train_flags("d"), "d/last/manifest.json");
  EXPECT_EQ(shell(bin("cohort-nmt") + " " + train_flags("d") + "--after-epochs 1 --overwrite").code,
            0);
}

TEST_F(NmtCommandTest, OutputThatCannotBeWrittenIsAFailure) {
  for (const char* command : {" nmt info --preset tiny", " doctor", " run -- echo lost"}) {
    const Ended ended = shell(bin("cohort") + command + " > /dev/full");
    EXPECT_EQ(ended.code, 1) << command;
    EXPECT_NE(ended.output.find("standard output cannot be written: No space left on device"),
              std::string::npos)
        << command << ended.output;
  }
  EXPECT_EQ(shell(bin("cohort") + " run -- seq 100000 | head -1").output, "1\n");
}

TEST_F(NmtCommandTest, TheSizeOfTheBaseModelIsPrinted) {
  const Ended ended = shell(bin("cohort") + " nmt info --preset base --dim-vocabs 32000 32000");
  EXPECT_EQ(ended.code, 0);
  EXPECT_NE(ended.output.find("93,255,680"), std::string::npos) << ended.output;
}

// The last update that the run in `model_dir` has saved; -1: none.
int64_t saved_update(const std::string& model_dir) {
  const auto manifest =
      nlohmann::json::parse(contents(model_dir + "/last/manifest.json"), nullptr, false);
  return manifest.is_object() ? std::stoll(manifest["facts"]["update"].get<std::string>()) : -1;
}

// Waits until the run in `model_dir` has saved update `update` or a later one.
bool has_saved(const std::string& model_dir, int64_t update) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    if (saved_update(model_dir) >= update) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST_F(NmtCommandTest, AStoppedRunGoesOnAsIfItHadNotBeen) {
  // 5 updates an epoch.
  const std::string flags =
      "--after-epochs 12 --early-stopping 100 --optimizer-delay 2 --exponential-smoothing 0.1 "
      "--save-freq 0.0001 ";
  const Ended whole = shell(on_ranks(2, train_flags("whole") + flags));
  ASSERT_EQ(whole.code, 0) << whole.output;

  const std::string command =
      on_ranks(2, train_flags("parts") + flags, "--log-dir " + path("logs"));
  const Ended first = shell(command + " --after-batches 7");
  ASSERT_EQ(first.code, 0) << first.output;
  // Of the 53 updates that are left, each stop waits for four: one that comes late still meets the
  // run.
  const auto stop_by = [&](int signal) {
    Ended ended;
    const int64_t before = saved_update(path("parts"));
    std::thread run([&] { ended = shell(command); });
    const bool saved = has_saved(path("parts"), before + 4);
    for (const auto& [pid, rank] : workers_of(path("logs"))) {
      if (signal == SIGKILL || rank == "1") kill(pid, signal);
    }
    run.join();
    EXPECT_TRUE(saved) << ended.output;
    return ended;
  };
  const Ended killed = stop_by(SIGKILL);
  EXPECT_EQ(killed.code, 137) << killed.output;
  const Ended asked = stop_by(SIGTERM);  // One rank is told; all agree.
  EXPECT_EQ(asked.code, 4) << asked.output;
  EXPECT_NE(asked.output.find("asked to stop by a signal"), std::string::npos) << asked.output;
  const Ended interrupted = stop_by(SIGINT);
  EXPECT_EQ(interrupted.code, 4) << interrupted.output;
  const Ended last = shell(command);
  EXPECT_EQ(last.code, 0) << last.output;

  const auto manifest = [&](const std::string& run, const char* kind) {
    return nlohmann::json::parse(contents(path(run + "/" + kind + "/manifest.json")));
  };
  EXPECT_EQ(manifest("parts", "last")["files"], manifest("whole", "last")["files"])
      << "weights, moments and averages";
  EXPECT_EQ(manifest("parts", "best")["files"], manifest("whole", "best")["files"]);
  EXPECT_EQ(manifest("parts", "last")["files"].size(), 3);
  for (const char* fact : {"epoch", "update", "best_metric", "validations_without_best"}) {
    EXPECT_EQ(manifest("parts", "last")["facts"][fact], manifest("whole", "last")["facts"][fact])
        << fact;
  }
  // One line a validation, none twice (the stop after 7 updates validated, too).
  std::set<int64_t> updates;
  std::istringstream history(contents(path("parts/history.jsonl")));
  for (std::string line; std::getline(history, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row["type"] != "valid") continue;
    const auto update = row["update"].get<int64_t>();
    EXPECT_TRUE(updates.empty() || update > *updates.rbegin()) << update;
    updates.insert(update);
  }
  EXPECT_TRUE(updates.contains(5) && updates.contains(40)) << contents(path("parts/history.jsonl"));

  const Ended again = shell(command);
  EXPECT_EQ(again.code, 0) << "a run that is done is done: " << again.output;
  EXPECT_EQ(manifest("parts", "last")["files"], manifest("whole", "last")["files"]);
}

TEST_F(NmtCommandTest, AStopCostsNoValidation) {
  // One update an epoch, so whichever update the signal comes in wants a validation.
  for (const std::string freq : {"1e", "1u"}) {
    std::string flags = train_flags(freq) +
                        "--after-epochs 60 --early-stopping 100 --save-freq 0.0001 --valid-freq " +
                        freq;
    flags.replace(flags.find("--mini-batch 16"), 15, "--mini-batch 300");
    const std::string command = on_ranks(1, flags, "--log-dir " + path("logs" + freq));
    Ended stopped;
    std::thread run([&] { stopped = shell(command); });
    const bool saved = has_saved(path(freq), 5);
    for (const auto& [pid, rank] : workers_of(path("logs" + freq))) kill(pid, SIGTERM);
    run.join();
    ASSERT_TRUE(saved) << stopped.output;
    ASSERT_EQ(stopped.code, 4) << stopped.output;
    const Ended rest = shell(command);
    ASSERT_EQ(rest.code, 0) << rest.output;
    int64_t validations = 0;
    std::istringstream history(contents(path(freq + "/history.jsonl")));
    for (std::string line; std::getline(history, line);) {
      const auto row = nlohmann::json::parse(line);
      if (!row.contains("valid_loss")) continue;
      EXPECT_EQ(row["update"], ++validations);
    }
    EXPECT_EQ(validations, 60);
  }
}

TEST_F(NmtCommandTest, TheFirstMetricDecides) {
  const auto lines_of = [&](const std::string& run) {
    std::vector<nlohmann::json> lines;
    std::istringstream history(contents(path(run + "/history.jsonl")));
    for (std::string line; std::getline(history, line);) {
      lines.push_back(nlohmann::json::parse(line));
      if (!lines.back().contains("valid_loss")) lines.pop_back();
    }
    return lines;
  };
  // A rate so high that the loss soon rises: patience runs out.
  std::string high_rate = train_flags("loss");
  high_rate.replace(high_rate.find("5e-3"), 4, "3e-1");
  const Ended by_loss = shell(bin("cohort-nmt") + " " + high_rate +
                              "--clip-norm 0 --valid-freq 2u --valid-on-start --after-epochs 40 "
                              "--valid-metrics ce-mean-words --early-stopping 3");
  ASSERT_EQ(by_loss.code, 0) << by_loss.output;
  EXPECT_NE(by_loss.output.find("no better ce-mean-words in 3 validations"), std::string::npos)
      << by_loss.output;
  EXPECT_FALSE(fs::exists(path("loss/result-dev.txt"))) << "nothing was to be translated";
  const auto lines = lines_of("loss");
  ASSERT_GE(lines.size(), 4);
  const auto best = std::find_if(lines.rbegin(), lines.rend(), [](const auto& line) {
    return line["best"].template get<bool>();
  });
  EXPECT_EQ(best - lines.rbegin(), 3) << "not one validation too many";
  const auto loss_facts = nlohmann::json::parse(contents(path("loss/best/manifest.json")))["facts"];
  EXPECT_TRUE(loss_facts.contains("valid_loss"));
  EXPECT_FALSE(loss_facts.contains("valid_bleu")) << "nothing was translated";
  EXPECT_EQ(by_loss.output.find("valid_bleu"), std::string::npos) << by_loss.output;
  EXPECT_NE(by_loss.output.find(" best_ce-mean-words="), std::string::npos) << by_loss.output;
  EXPECT_EQ(lines.front()["update"], 0) << "before the first update";
  EXPECT_TRUE(lines.front()["train_loss"].is_null());
  double least = 1e9;
  for (const auto& line : lines) {
    const auto loss = line["valid_loss"].get<double>();
    EXPECT_EQ(line["best"].get<bool>(), loss < least) << line;
    least = std::min(least, loss);
  }

  const Ended by_chrf =
      shell(bin("cohort-nmt") + " " + train_flags("chrf") +
            "--valid-metrics chrf --early-stopping 100 --valid-freq 5u --after-epochs 3");
  ASSERT_EQ(by_chrf.code, 0) << by_chrf.output;
  double most = -1;
  for (const auto& line : lines_of("chrf")) {
    const auto chrf = line["valid_chrf"].get<double>();
    EXPECT_EQ(line["best"].get<bool>(), chrf > most) << line;
    most = std::max(most, chrf);
  }
  EXPECT_GT(most, 0);
  expect_refused(train_flags("chrf") + "--valid-metrics bleu",
                 "holds a run with valid_metric chrf, now it is bleu");
  expect_refused(train_flags("x") + "--valid-metrics ter", "--valid-metrics ter: expected");
  expect_refused(train_flags("x") + "--valid-metrics bleu bleu",
                 "--valid-metrics bleu bleu: expected each of them once");
}

// Whatever is damaged in best/: it is neither reported as the best nor replaced by worse.
TEST_F(NmtCommandTest, ADamagedBestIsRefusedAndLeftAsItIs) {
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train_flags("best") + "--after-epochs 2").code, 0);
  const std::string more = train_flags("best") + "--after-epochs 3";
  fs::path weights;
  for (const auto& entry : fs::directory_iterator(path("best/best")))
    if (entry.path().extension() == ".safetensors") weights = entry.path();
  for (const fs::path& file : {fs::path(path("best/best/manifest.json")), weights}) {
    const std::string whole = contents(file);
    std::string flipped = whole;
    flipped[whole.size() - 9] = static_cast<char>(flipped[whole.size() - 9] ^ 1);
    for (const std::string& damaged : {std::string(), flipped}) {
      std::ofstream(file, std::ios::binary) << damaged;
      expect_refused(more, file.filename().string());
      expect_refused(more, "once " + path("best/best") + " is moved away");
      EXPECT_EQ(contents(file), damaged);
    }
    std::ofstream(file, std::ios::binary) << whole;
  }
  fs::rename(path("best/best"), path("aside"));
  const Ended without = shell(bin("cohort-nmt") + " " + more);
  EXPECT_EQ(without.code, 0) << without.output;
  EXPECT_TRUE(fs::exists(path("best/best/manifest.json")));
}

TEST_F(NmtCommandTest, TwoTrainingsDoNotShareAFolder) {
  const std::string flags = train_flags("held") + "--after-epochs 100000 --early-stopping 0";
  const Ended second =
      shell(bin("cohort-nmt") + " " + flags + " > " + path("log") +
            " 2>&1 & FIRST=$!; for i in $(seq 600); do [ -s " + path("held/history.jsonl") +
            " ] && break; sleep 0.1; done; " + bin("cohort-nmt") + " " + flags +
            " --overwrite; code=$?; kill -INT $FIRST; wait $FIRST; echo first $?; (exit $code)");
  EXPECT_EQ(second.code, 2) << second.output;
  EXPECT_NE(second.output.find("--model-dir " + path("held") +
                               ": another training is running in this folder\n"),
            std::string::npos)
      << second.output;
  EXPECT_NE(second.output.find("first 4"), std::string::npos)
      << second.output << contents(path("log"));
  EXPECT_TRUE(fs::exists(path("held/last/manifest.json")));
}

TEST_F(NmtCommandTest, EachEpochsBarStaysOnTheTerminal) {
  std::string flags = train_flags("bars") + "--after-epochs 2";
  const std::string quiet = "--quiet ";
  flags.erase(flags.find(quiet), quiet.size());
  const Ended ended = shell("LC_ALL=C TERM=xterm script -qec '" + bin("cohort-nmt") + " " + flags +
                            "' " + path("typescript"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const std::string shown = contents(path("typescript"));
  for (const std::string epoch : {"1", "2"}) {
    // What follows a bar that is erased is no new line.
    const std::regex bar("epoch " + epoch + " \\[=+\\] 19/19[^\r\n\x1b]*\r+\n");
    EXPECT_TRUE(std::regex_search(shown, bar)) << shown;
  }
}

TEST_F(NmtCommandTest, ARunByBleuIsNotResumedWithAnotherTokenizer) {
  const std::string flags = train_flags("b") + "--valid-metrics bleu --after-epochs 1 ";
  const Ended first = shell(bin("cohort-nmt") + " " + flags);
  ASSERT_EQ(first.code, 0) << first.output;
  std::string other = flags;
  const std::string tokenize = "--tokenize 13a";
  ASSERT_NE(other.find(tokenize), std::string::npos) << other;
  other.replace(other.find(tokenize), tokenize.size(), "--tokenize char");
  expect_refused(other, "holds a run with valid_tokenize 13a, now it is char");
}

// Early stopping and best/ would compare scores of two texts.
TEST_F(NmtCommandTest, ARunIsNotResumedWithAnotherValidationText) {
  const std::string flags = train_flags("v") + "--after-epochs 1 ";
  const Ended first = shell(bin("cohort-nmt") + " " + flags);
  ASSERT_EQ(first.code, 0) << first.output;
  std::string other = flags;
  const size_t begin = other.find("--valid-sets ") + 13;
  const size_t end = other.find(' ', other.find(' ', begin) + 1);
  std::istringstream files(other.substr(begin, end - begin));
  std::string english, german;
  ASSERT_TRUE(files >> english >> german) << other;
  other.replace(begin, end - begin, german + " " + english);
  expect_refused(other, "holds a run with another text of --valid-sets: valid_sets_sha256 ");
}

// Rank 1's logarithms grow from call to call, as those of another CPU may be others: by its own
// scores every validation is the best.
TEST_F(NmtCommandTest, EveryRankStopsEarlyByTheScoresOfRankZero) {
  std::string flags = standing_still("e");
  flags.replace(flags.find("--tokenize 13a"), 14, "--tokenize char");
  const Ended ended =
      shell(bin("cohort") +
            " run --nproc-per-node 2 -- sh -c 'if [ $RANK = 1 ]; then export LD_PRELOAD=" +
            bin("../tests/plugins/rising_log.so") + "; fi; exec \"$@\"' - " + bin("cohort-nmt") +
            " " + flags + "--valid-freq 2u --early-stopping 2 --after-epochs 50 --timeout 30");
  ASSERT_EQ(ended.code, 0) << ended.output;
  for (const std::string rank : {"0", "1"}) {
    const std::string log = contents(path("e/logs/rank" + rank + ".log"));
    EXPECT_NE(log.find("end reason=\"no better bleu in 2 validations\""), std::string::npos) << log;
    EXPECT_NE(log.find("updates=6"), std::string::npos) << log;
  }
  const auto best = nlohmann::json::parse(contents(path("e/best/manifest.json")));
  EXPECT_EQ(best["facts"]["update"], "2");
  EXPECT_GT(std::stod(best["facts"]["valid_bleu"].get<std::string>()), 0) << "else no logarithm";
}

TEST_F(NmtCommandTest, ARunGoesOnWithAnotherNumberOfRanks) {
  const auto trained_sentences = [&] {
    return nlohmann::json::parse(contents(path("r/last/manifest.json")))["facts"];
  };
  const auto run = [&](int ranks, const std::string& flags) {
    const Ended ended = shell(on_ranks(ranks, train_flags("r") + flags));
    EXPECT_EQ(ended.code, 0) << ended.output;
  };
  run(2, "--after-batches 4");
  run(3, "--after-batches 6");
  EXPECT_EQ(nlohmann::json::parse(trained_sentences()["trained"].get<std::string>()).size(), 2);
  run(1, "--after-epochs 1");
  // 300 sentences: 4 updates of 2 x 16, 2 of 3 x 16, the other 76 on one rank in 5 more; or in 6,
  // where one of the 14 batches was the short one that is left at an epoch's end.
  const int updates = std::stoi(trained_sentences()["update"].get<std::string>());
  EXPECT_GE(updates, 11);
  EXPECT_LE(updates, 12);
  EXPECT_EQ(trained_sentences()["epoch"], "1");
}

TEST_F(NmtCommandTest, KeptCheckpointsAreAveraged) {
  const Ended trained =
      shell(bin("cohort-nmt") + " " + train_flags("k") +
            "--after-batches 25 --save-interval-updates 5 --keep-interval-updates 3");
  ASSERT_EQ(trained.code, 0) << trained.output;
  std::set<std::string> kept;
  for (const auto& entry : fs::directory_iterator(path("k/checkpoints")))
    kept.insert(entry.path().filename());
  EXPECT_EQ(kept, (std::set<std::string>{"15", "20", "25"}));
  const std::string average = "average --model-dir " + path("k") + " --output ";
  const Ended averaged = shell(bin("cohort-nmt") + " " + average + path("mean") + " --last 2");
  EXPECT_EQ(averaged.code, 0) << averaged.output;
  const auto weights = [&](const std::string& folder, int64_t update) {
    const cohort::SafetensorsFile file(path(folder) + "/weights-" + std::to_string(update) +
                                       ".safetensors");
    const auto bytes = file.at("source_embedding").bytes;
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  const auto a = weights("k/checkpoints/20", 20), b = weights("k/checkpoints/25", 25),
             mean = weights("mean/best", 25);
  ASSERT_EQ(mean.size(), a.size());
  EXPECT_NE(a, b);
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(mean[i], static_cast<float>((static_cast<double>(a[i]) + b[i]) / 2));
  EXPECT_EQ(
      shell("echo red cat | " + bin("cohort-nmt") + " translate --model-dir " + path("mean")).code,
      0);
  expect_refused(average + path("mean"), "mean already holds a model");
  expect_refused(average + path("new") + " --last 4", "3 updates: expected at least 4");
  EXPECT_FALSE(fs::exists(path("new")));
}

// Rewrites the checkpoint of `folder`, with all elements of one of its weights set to `value`.
void set_weight(const std::string& folder, const std::string& name, float value) {
  cohort::StoredCheckpoint checkpoint(folder);
  cohort::Manifest manifest = checkpoint.manifest();
  std::vector<cohort::StoredShard> shards;
  std::vector<float> values;
  for (const auto& [weight, stored] : checkpoint.part("weights")) {
    const auto count = cohort::num_elements(stored.shape).value();
    auto bytes = checkpoint.elements("weights", weight, {0, count}).front();
    if (weight == name) {
      values.assign(static_cast<size_t>(count), value);
      bytes = std::as_bytes(std::span(values));
    }
    shards.push_back({weight, stored.dtype, stored.shape, {0, count}, bytes});
  }
  manifest.files["weights"] =
      write_share(folder, "weights", shards, {.update = *manifest.update}).files.at("weights");
  commit_manifest(folder, manifest);
}

TEST_F(NmtCommandTest, AQuantizedModelTranslatesAsOneQuantizedWhenLoaded) {
  const Ended trained =
      shell(bin("cohort-nmt") + " " + train_flags("run") + "--after-epochs 4 --max-length 20");
  ASSERT_EQ(trained.code, 0) << trained.output;
  const std::string quantize = "quantize --model-dir " + path("run") + " --output ";
  fs::create_directories(fs::path(path("q")) /
                         "best");  // As one that a full disk cut short left it.
  const Ended quantized = shell(bin("cohort-nmt") + " " + quantize + path("q"));
  ASSERT_EQ(quantized.code, 0) << quantized.output;
  const auto nmt = [&](const std::string& command, const std::string& flags) {
    const Ended ended = shell(bin("cohort-nmt") + " " + command + " --model-dir " + flags);
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  const std::string valid = path("valid.en") + " " + path("valid.xx");
  const std::string input = " < " + path("valid.en");
  for (const char* flags : {" --beam-size 1", " --n-best"}) {
    const std::string translated = nmt("translate", path("q") + flags + input);
    EXPECT_GE(cohort::test::lines_of(translated).size(), 40U);
    EXPECT_EQ(translated, nmt("translate", path("run") + " --precision int8" + flags + input));
    EXPECT_EQ(translated,
              nmt("translate", path("q") + " --mini-batch 1 --maxi-batch 1" + flags + input));
    EXPECT_EQ(translated,
              nmt("translate", path("q") + " --mini-batch 5 --cpu-threads 2" + flags + input));
  }
  EXPECT_NE(nmt("translate", path("q") + " --n-best" + input),
            nmt("translate", path("run") + " --precision float32 --n-best" + input));
  for (const std::string& command :
       {std::string("score --test-sets "), std::string("evaluate --json --test-sets ")}) {
    EXPECT_EQ(nmt(command + valid, path("q")),
              nmt(command + valid, path("run") + " --precision int8"));
  }

  expect_refused(quantize + path("q"), "q already holds a model");
  expect_refused("quantize --model-dir " + path("q") + " --output " + path("new"),
                 "q/best holds 8-bit weights already");
  EXPECT_FALSE(fs::exists(path("new")));
  expect_refused("average --model-dir " + path("q") + " --output " + path("new"),
                 "q holds 8-bit weights, which have no mean: average the checkpoints of the run "
                 "that it was made of, then round the mean by cohort nmt quantize");
  // A file is in the folder's place, a folder in the vocabulary's.
  expect_refused(quantize + path("valid.en"), "valid.en: Not a directory");
  fs::create_directories(path("taken/target.spm"));
  expect_refused(quantize + path("taken"), "taken/target.spm: ");
  EXPECT_FALSE(fs::exists(path("taken/best"))) << "it would be a model without vocabularies";
  expect_refused("translate --precision bfloat16 --model-dir " + path("q"),
                 "q/best holds 8-bit weights");
  expect_refused(
      "export --to ctranslate2 --output-dir " + path("new") + " --model-dir " + path("q"),
      "q/best holds 8-bit weights, which cannot be turned back into float32: expected int8, or the "
      "--model-dir that nmt quantize read");
  expect_refused(train_flags("q"), "q has history.jsonl or best/ but no last/");
  expect_refused(train_flags("new") + "--precision int8",
                 "--precision int8: expected auto, bfloat16 or float32");

  const float nan = std::nanf("");
  set_weight(path("q/best"), "encoder.layers.0.linear1.weight_scale", nan);
  expect_refused("translate --model-dir " + path("q"),
                 "q/best: encoder.layers.0.linear1.weight_scale[0]: expected a finite scale");
  set_weight(path("run/best"), "encoder.layers.0.linear1.weight", nan);
  for (const std::string& command :
       {"quantize --output " + path("new"), std::string("translate --precision int8")}) {
    expect_refused(command + " --model-dir " + path("run"),
                   "encoder.layers.0.linear1.weight: expected finite numbers, got NaN or infinity "
                   "in row 0");
  }
}

TEST_F(NmtCommandTest, DivergenceEndsTheRunWithAGoodCheckpoint) {
  std::string flags = train_flags("v") + "--precision float32 ";
  flags.replace(flags.find("--mini-batch 16"), 15,
                "--mini-batch 8");  // so that no epoch ends before
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + flags + "--after-batches 1").code, 0);
  set_weight(path("v/last"), "decoder.norm.weight", 3e38F);  // finite, but its products are not
  const Ended ended = shell(on_ranks(2, flags + "--after-epochs 5"));
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("diverged: the loss or the gradient of "), std::string::npos)
      << ended.output;
  EXPECT_NE(ended.output.find("skipped an update: a number is not finite"), std::string::npos)
      << ended.output;
  EXPECT_TRUE(fs::exists(path("v/last/manifest.json")));
  for (const char* field : {" rank=0 ", " loss=", " gradient=", " sentences=\""})
    EXPECT_NE(ended.output.find(field), std::string::npos) << field << " in " << ended.output;
  const std::string history = contents(path("v/history.jsonl"));
  const auto end = nlohmann::json::parse(history.substr(history.rfind("{\"type\"")));
  EXPECT_EQ(end["type"], "end");
  EXPECT_EQ(end["reason"].get<std::string>().find("diverged: the loss or the gradient of "), 0U)
      << end;
  EXPECT_NE(contents(path("v/report.html")).find("diverged: the loss"), std::string::npos);
}

TEST_F(NmtCommandTest, ARunThatWasNeverValidatedSaysSo) {
  std::string flags =
      train_flags("s") + "--after-epochs 1000 --valid-freq 1000e --save-freq 0.0001";
  flags.replace(flags.find("--mini-batch 16"), 15, "--mini-batch 1");
  flags.erase(flags.find("--quiet "), 8);
  const std::string command = on_ranks(1, flags, "--log-dir " + path("logs"));
  Ended stopped;
  std::thread run([&] { stopped = shell(command); });
  const bool saved = has_saved(path("s"), 2);
  for (const auto& [pid, rank] : workers_of(path("logs"))) kill(pid, SIGTERM);
  run.join();
  ASSERT_TRUE(saved) << stopped.output;
  EXPECT_EQ(stopped.code, 4) << stopped.output;
  EXPECT_NE(stopped.output.find("best by bleu: not validated yet\n"), std::string::npos)
      << stopped.output;
  EXPECT_FALSE(fs::exists(path("s/best")));
}

TEST_F(NmtCommandTest, AValidationAtTheStartIsMadeOnce) {
  const std::string command =
      bin("cohort-nmt") + " " + train_flags("z") + "--valid-on-start --after-batches ";
  ASSERT_EQ(shell(command + "1 --time-limit 1e-9").code, 0);
  const auto count_valid = [&] {
    int64_t count = 0;
    std::istringstream history(contents(path("z/history.jsonl")));
    for (std::string line; std::getline(history, line);)
      count += nlohmann::json::parse(line)["type"] == "valid" ? 1 : 0;
    return count;
  };
  const int64_t before = count_valid();
  EXPECT_GE(before, 1);
  // As a run stands that was stopped before its first update.
  const std::string manifest = path("z/last/manifest.json");
  auto json = nlohmann::json::parse(contents(manifest));
  json["facts"]["update"] = "0";
  json["facts"]["trained"] = "[]";
  json["facts"]["epoch"] = "0";
  json["facts"]["token_sum"] = "0";
  json.erase("sha256");
  std::ofstream(manifest) << json.dump(2);
  const Ended again = shell(command + "1");
  ASSERT_EQ(again.code, 0) << again.output;
  EXPECT_EQ(count_valid(), 2) << "one at the start, one at the end:\n"
                              << contents(path("z/history.jsonl"));
}

TEST_F(NmtCommandTest, FittedBatchesAreNotFittedAgain) {
  std::string flags = train_flags("f");
  flags.replace(flags.find("--mini-batch 16"), 15, "--mini-batch-fit --workspace 2");
  const auto run = [&](const std::string& more) {
    const Ended ended = shell(bin("cohort-nmt") + " " + flags + more);
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const std::string first = run("--after-batches 2");
  EXPECT_TRUE(has(first, "batch fits ")) << first;
  const std::string same = run("--after-batches 3");
  EXPECT_FALSE(has(same, "batch fits ")) << same;
  EXPECT_TRUE(has(same, "batch sizes fitted earlier are used again")) << same;
  EXPECT_FALSE(has(same, "planned again")) << same;
  flags.replace(flags.find("--workspace 2"), 13, "--workspace 1");
  const std::string other = run("--after-batches 4");
  EXPECT_TRUE(has(other, "batch fits ")) << other;
  EXPECT_TRUE(has(other, "the rest of the epoch is planned again")) << other;
}

// One of both is not what is measured here, if the processor has both.
TEST_F(NmtCommandTest, AutoIsThePrecisionOfTheRunThatResumes) {
  for (const std::string precision : {"float32", "bfloat16"}) {
    const std::string flags = bin("cohort-nmt") + " " + train_flags(precision);
    const Ended first = shell(flags + "--after-batches 1 --precision " + precision);
    if (first.output.find("this CPU does not multiply it") != std::string::npos) continue;
    ASSERT_EQ(first.code, 0) << first.output;
    const Ended resumed = shell(flags + "--after-batches 2 --precision auto");
    EXPECT_NE(resumed.output.find("--precision auto: the run's precision is used again precision=" +
                                  precision),
              std::string::npos)
        << resumed.output;
    const auto manifest = nlohmann::json::parse(contents(path(precision + "/last/manifest.json")));
    EXPECT_EQ(manifest["facts"]["precision"], precision);
    EXPECT_EQ(manifest["facts"]["update"], "2");
  }
}

// The other ranks say what rank 0 found, not that they lost it.
TEST_F(NmtCommandTest, AllRanksHearWhyRankZeroCannotGoOn) {
  const auto expect_told = [&](const std::string& flags, const std::string& text) {
    const Ended ended = shell(on_ranks(2, flags, "--log-dir " + path("logs")));
    EXPECT_EQ(ended.code, 2) << ended.output;
    const std::string other = contents(path("logs/rank1.stderr.log"));
    EXPECT_NE(other.find("rank 0: "), std::string::npos) << other;
    EXPECT_NE(other.find(text), std::string::npos) << other;
  };
  std::string too_many = train_flags("t");
  too_many.replace(too_many.find("60 60"), 5, "60 6000");
  expect_told(too_many, "target vocabulary: ");
  ASSERT_EQ(shell(on_ranks(2, train_flags("t") + "--after-batches 2")).code, 0);
  expect_told(train_flags("t") + "--tied-embeddings", "model.tied_embeddings 0, now it is 1");
  fs::resize_file(path("t/last/weights-2.safetensors"), 100);
  expect_told(train_flags("t") + "--after-batches 4", "weights-2.safetensors");
  fs::remove_all(path("t/last"));
  expect_told(train_flags("t"), "has history.jsonl or best/ but no last/");
}

// A file in the way of checkpoints/5, and a folder among those to be removed that cannot be: a
// mount point.
TEST_F(NmtCommandTest, KeptCheckpointsGoOnlyForOnesThatAreThere) {
  fs::create_directories(path("k/checkpoints"));
  const std::string flags =
      train_flags("k") + "--save-interval-updates 5 --keep-interval-updates 1 ";
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + flags + "--after-batches 5").code, 0);
  std::ofstream(path("k/checkpoints/10")) << "in the way";
  const Ended failed = shell(bin("cohort-nmt") + " " + flags + "--after-batches 10");
  EXPECT_NE(failed.output.find("a checkpoint was not written"), std::string::npos) << failed.output;
  EXPECT_TRUE(fs::exists(path("k/checkpoints/5/manifest.json"))) << "the last good one stays";
  const std::string mounted = path("k/checkpoints/5/mount");
  fs::create_directory(mounted);
  const Ended kept = shell("unshare -m sh -c 'mount -t tmpfs none " + mounted + " && " +
                           bin("cohort-nmt") + " " + flags + "--after-batches 15'");
  EXPECT_EQ(kept.code, 0) << kept.output;
  EXPECT_NE(kept.output.find("an earlier checkpoint cannot be removed; training continues"),
            std::string::npos)
      << kept.output;
  EXPECT_TRUE(fs::exists(path("k/checkpoints/15/manifest.json")));
}

TEST_F(NmtCommandTest, WhatCannotGoOnIsNamed) {
  const std::string train = train_flags("n");
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train + " --after-batches 2").code, 0);
  expect_refused(train + " --after-batches 4 --tied-embeddings",
                 "model.tied_embeddings 0, now it is 1");
  std::ofstream(path("train.en"), std::ios::app) << "one more\n";
  std::ofstream(path("train.xx"), std::ios::app) << "eno erom\n";
  expect_refused(train + " --after-batches 4",
                 "holds a run with another text of --train-sets: train_sets_sha256 ");
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + train + " --overwrite --after-batches 2").code, 0);
  for (const auto& entry : fs::directory_iterator(path("n/last"))) {
    if (!entry.path().filename().string().starts_with("optimizer")) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put('!');
  }
  expect_refused(train + " --after-batches 4", "optimizer-2.safetensors: its SHA-256 is not");
  expect_refused(train + " --after-batches 4", "or another --model-dir, or --overwrite");
  fs::remove_all(path("n/last"));
  expect_refused(train + " --after-batches 4", "has history.jsonl or best/ but no last/");
}

// A rank that dies as soon as the run has a record, as one without memory does in its first update.
TEST_F(NmtCommandTest, ARunThatDiesAtOnceIsRestarted) {
  const std::string train = bin("cohort-nmt") + " " + train_flags("d") + "--after-batches 3";
  std::ofstream(path("dies.sh")) << "if [ $TORCHELASTIC_RESTART_COUNT$RANK != 01 ]; then exec "
                                 << train << "; fi\n"
                                 << train << " &\nuntil [ -s " << path("d/history.jsonl")
                                 << " ]; do sleep 0.005; done\nkill -9 $!\nwait $!\nexit 1\n";
  const Ended ended =
      shell(bin("cohort") + " run --nproc-per-node 2 --max-restarts 1 -- sh " + path("dies.sh"));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find(" epochs=0 updates=3 "), std::string::npos) << ended.output;
}

TEST_F(NmtCommandTest, ARestartReplacesTheRunOfAnotherJob) {
  const std::string train = bin("cohort-nmt") + " " + train_flags("o");
  ASSERT_EQ(shell(bin("cohort") + " run -- " + train + "--after-batches 3").code, 0);
  std::ofstream(path("later.sh")) << "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 1\nexec " << train
                                  << "--overwrite --after-batches 2\n";
  const Ended ended = shell(bin("cohort") + " run --max-restarts 1 -- sh " + path("later.sh"));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find(" epochs=0 updates=2 "), std::string::npos) << ended.output;
  const auto manifest = nlohmann::json::parse(contents(path("o/last/manifest.json")));
  EXPECT_EQ(manifest["facts"]["update"], "2");
}

// The run was killed after a validation, and comes to no weights as good once it resumes.
TEST_F(NmtCommandTest, TheResultIsOfTheWeightsInBest) {
  const std::string more = "--precision float32 --valid-freq 5u --after-batches ";
  const auto train = [&](const std::string& flags) {
    return shell(bin("cohort-nmt") + " " + flags);
  };
  ASSERT_EQ(train(train_flags("p") + more + "5").code, 0);
  fs::copy(path("p/last"), path("p/early"), fs::copy_options::recursive);
  ASSERT_EQ(train(train_flags("p") + more + "10").code, 0);
  fs::remove_all(path("p/last"));
  fs::rename(path("p/early"), path("p/last"));
  std::string flags = standing_still("p") + more + "6";
  flags.erase(flags.find("--quiet "), 8);
  const Ended resumed = train(flags);
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  const auto best = nlohmann::json::parse(contents(path("p/best/manifest.json")))["facts"];
  ASSERT_EQ(best["update"], "10");
  char loss[64];
  std::snprintf(loss, sizeof loss, "loss %.4f, in ",
                std::stod(best["valid_loss"].get<std::string>()));
  EXPECT_NE(resumed.output.find(loss), std::string::npos) << loss << resumed.output;
}

TEST_F(NmtCommandTest, AKilledRankEndsTheRunByName) {
  Ended ended;
  std::chrono::steady_clock::time_point killed;
  std::thread run([&] {
    ended = shell(on_ranks(3, train_flags("e") + "--after-epochs 100000 --early-stopping 0",
                           "--log-dir " + path("logs")));
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  pid_t victim = 0;
  while (victim == 0 && std::chrono::steady_clock::now() < deadline) {
    if (contents(path("e/history.jsonl")).find("valid_loss") != std::string::npos) {
      for (const auto& [pid, rank] : workers_of(path("logs"))) {
        if (rank == "1") victim = pid;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  killed = std::chrono::steady_clock::now();
  if (victim > 0) {
    kill(victim, SIGKILL);
  } else {
    for (const auto& [pid, rank] : workers_of(path("logs"))) kill(pid, SIGKILL);
  }
  run.join();
  EXPECT_NE(contents(path("e/history.jsonl")).find("\"reason\":\"lost rank 1"), std::string::npos)
      << "the record says why it ended";
  ASSERT_GT(victim, 0) << ended.output;
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(40));
  EXPECT_EQ(ended.code, 137) << ended.output;
  EXPECT_NE(ended.output.find("rank 1"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("killed by signal 9"), std::string::npos) << ended.output;
  for (const char* rank : {"0", "2"}) {
    const std::string log = contents(path(std::string("logs/rank") + rank + ".stderr.log"));
    EXPECT_NE(log.find("lost rank 1 in "), std::string::npos) << "rank " << rank << ": " << log;
  }
  EXPECT_TRUE(workers_of(path("logs")).empty());
}

}  // namespace nmt_command_test
