// SPDX-License-Identifier: Apache-2.0
// The form of the command line: help, configuration files and shell completion.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cohort/cli/milliseconds.h"

#include "bench/median.h"
#include "tests/apps/nmt_command.h"
#include "tests/support/shell.h"

namespace command_line_test {

namespace fs = std::filesystem;
using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::fields_of;
using cohort::test::lines_of;
using cohort::test::NmtCommand;
using cohort::test::shell;

// Commands of these programs, as "nmt train".
std::vector<std::string> commands() {
  std::vector<std::string> found;
  for (const char* program : {"cohort-nmt", "cohort-bench", "cohort-doctor"}) {
    for (const std::string& line : lines_of(shell(bin(program) + " __flags").output)) {
      if (line.starts_with("command\t")) found.push_back(fields_of(line).at(1));
    }
  }
  return found;
}

TEST(HelpTest, EveryCommandsHelpFitsIn100ColumnsAndSaysWhatEachFlagIs) {
  std::vector<std::string> all = commands();
  EXPECT_GE(all.size(), 9U);
  all.insert(all.end(), {"run", "completion", ""});
  for (const std::string& command : all) {
    const Ended help = shell(bin("cohort") + " " + command + " --help");
    EXPECT_EQ(help.code, 0) << command << help.output;
    EXPECT_NE(help.output.find("Usage: cohort " + command), std::string::npos) << help.output;
    for (const std::string& line : lines_of(help.output)) {
      EXPECT_LE(line.size(), 100U) << command << ": " << line;
      // CLI11's names of types are no units.
      for (const char* raw : {" INT", " FLOAT", " UINT", "=", ":{"})
        EXPECT_EQ(line.substr(0, 36).find(raw), std::string::npos) << command << ": " << line;
    }
  }
  for (const char* program : {"cohort-nmt", "cohort-bench", "cohort-doctor"}) {
    for (const std::string& line : lines_of(shell(bin(program) + " __flags").output))
      EXPECT_EQ(fields_of(line).size(), 7U) << "no description: " << line;
  }
}

TEST(HelpTest, FlagsStandByTopicWithUnitAndDefault) {
  const std::string help = shell(bin("cohort") + " nmt train --help").output;
  for (const char* part :
       {"\nData:\n", "\nModel:\n", "\nTraining:\n", "\nValidation:\n", "\nRanks:\n", "\nOther:\n",
        "--save-freq MINUTES ", "--timeout SECONDS ", "--max-length TOKENS ",
        "--train-sets FILE [FILE] ", "auto, bfloat16 or float32 [auto]", "(required)"}) {
    EXPECT_NE(help.find(part), std::string::npos) << part << " in:\n" << help;
  }
  EXPECT_NE(help.find("--devices N ... "), std::string::npos) << help;
  // What a flag does that is left out stands there, too.
  for (const char* part :
       {"Model width (default: the preset's)\n", "Host of rank 0 (default: MASTER_ADDR)\n"})
    EXPECT_NE(help.find(part), std::string::npos) << part << " in:\n" << help;
  EXPECT_LT(help.find("\nData:\n"), help.find("\nRanks:\n"));
  EXPECT_LT(help.find("\nRanks:\n"), help.find("\nOther:\n"));
}

TEST(HelpTest, ValuesOfSeveralKindsAreNamed) {
  for (const std::string command : {"translate", "evaluate"}) {
    const std::string help = shell(bin("cohort") + " nmt " + command + " --help").output;
    EXPECT_NE(help.find("  --shortlist FILE [FIRST [BEST [PRUNE]]]\n"), std::string::npos) << help;
    // Shells complete the first.
    const std::string flags = shell(bin("cohort-nmt") + " __flags").output;
    EXPECT_NE(flags.find("flag\tnmt " + command + "\t--shortlist\t4\tFILE\t\t"), std::string::npos)
        << flags;
  }
}

// As after `scripts/build programs`.
TEST(DispatchTest, AProgramThatIsNotBuiltIsNamedWithWhatBuildsIt) {
  const std::string copy = "d=$(mktemp -d); cp " + bin("cohort") + " $d; cd $d; ";
  for (const std::string name : {"ps", "doctor", "bench", "checkpoint", "nmt"}) {
    const Ended ended = shell(copy + "./cohort " + name + "; code=$?; rm -r $d; exit $code");
    EXPECT_EQ(ended.code, 2);
    EXPECT_EQ(ended.output.find("cohort: error: cohort " + name + ": expected /"), 0U)
        << ended.output;
    EXPECT_NE(ended.output.find("/cohort-" + name +
                                ", got no such program; build it with scripts/build\n"),
              std::string::npos)
        << ended.output;
  }
  const Ended servers =
      shell(copy + "./cohort run --servers 1 -- true; code=$?; rm -r $d; exit $code");
  EXPECT_EQ(servers.code, 2);
  EXPECT_NE(servers.output.find("/cohort-ps, got no such program; build it with scripts/build, or "
                                "name one in --server-program\n"),
            std::string::npos)
      << servers.output;
}

// The backend would transfer nothing: the ranks' tensors are on the CPU, and Gloo would take them
// without an error.
TEST(BackendFlagTest, ABackendOfAnotherDeviceIsRefused) {
  const std::string path = "COHORT_BACKEND_PATH=" + bin("../tests/plugins") + " ";
  const std::string bench = " bench ddp --layers 1 --width 8 --batch 2 --steps 1 --warmup 0";
  const Ended refused = shell(path + bin("cohort") + bench + " --dist-backend hccl_meta");
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_NE(refused.output.find(
                "--dist-backend hccl_meta: expected a backend of cpu tensors, for this program "
                "computes on cpu, got one of meta tensors\n"),
            std::string::npos)
      << refused.output;
  const std::string train = " nmt train --train-sets a b --valid-sets a b --model-dir m";
  for (const auto& [flags, text] :
       {std::pair{" --device tpu", "device \"tpu\": expected cpu, cuda or cuda:N"},
        {" --allow-tf32", "--allow-tf32: expected a CUDA --device, got cpu"},
        {" --dist-backend nccl", "--dist-backend nccl: expected --device cuda"},
        {" --devices 0 1", "--devices: expected one for each rank of this host, 1, got 2"},
        {" --device cuda:0 --devices 0 1", " excludes --device"}}) {
    const Ended ended = shell(bin("cohort") + train + flags);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected " << text;
  }
  const Ended taken = shell(path + bin("cohort") + bench + " --dist-backend hccl");
  EXPECT_EQ(taken.code, 0) << taken.output;
}

TEST(GroupFlagsTest, ATimeLimitIsNamedWithBothOfItsBounds) {
  const std::string bench = bin("cohort") + " bench ddp --layers 1 --width 8 --batch 2 --steps 1";
  for (const std::string flag : {"--timeout", "--rendezvous-timeout"}) {
    for (const std::string value : {"20000000", "0", "-1"}) {
      const std::string given = " " + flag + " " + value;
      const Ended ended = shell(bench + given);
      EXPECT_EQ(ended.code, 2) << ended.output;
      EXPECT_NE(ended.output.find(given + ": expected seconds above 0 and below 10000000"),
                std::string::npos)
          << ended.output;
    }
  }
}

TEST(MillisecondsTest, ATimeAboveZeroIsNotRoundedToZero) {
  using cohort::cli::to_milliseconds;
  EXPECT_EQ(to_milliseconds(0).count(), 0);
  EXPECT_EQ(to_milliseconds(1e-9).count(), 1);
  EXPECT_EQ(to_milliseconds(0.0004).count(), 1);
  EXPECT_EQ(to_milliseconds(0.0016).count(), 2);
  EXPECT_EQ(to_milliseconds(600).count(), 600'000);
}

class ConfigFileTest : public NmtCommand {
 protected:
  std::string nmt(const std::string& flags) const { return bin("cohort-nmt") + " " + flags; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
  static void expect_lines(const Ended& ended, const std::vector<std::string>& expected) {
    EXPECT_EQ(ended.code, 0) << ended.output;
    const auto lines = lines_of(ended.output);
    for (const std::string& line : expected)
      EXPECT_NE(std::ranges::find(lines, line), lines.end()) << line << "\nin " << ended.output;
  }
};

TEST_F(ConfigFileTest, ADumpedRunIsTheSameRun) {
  std::string flags = train_flags("a") + "--after-batches 12 --word-penalty -0.25 ";
  // Flags that depend on others: --mini-batch, --noam-factor.
  flags.replace(flags.find("--mini-batch 16"), 15, "--mini-batch-words 120");
  const Ended dump = shell(nmt(flags + "--dump-config"));
  ASSERT_EQ(dump.code, 0) << dump.output;
  EXPECT_FALSE(fs::exists(path("a"))) << "nothing is trained";
  const std::string file = write("run.yaml", dump.output);
  EXPECT_EQ(shell(nmt("train --config " + file + " --dump-config")).output, dump.output);
  expect_lines(dump, {"# mini-batch: 0", "# noam-factor:", "word-penalty: -0.25", "quiet: true"});

  ASSERT_EQ(shell(nmt(flags)).code, 0);
  const Ended again = shell(nmt("train -c " + file + " --model-dir " + path("b")));
  ASSERT_EQ(again.code, 0) << again.output;
  const auto json = [&](const std::string& name) {
    return nlohmann::json::parse(contents(path(name)));
  };
  EXPECT_EQ(json("a/last/manifest.json")["files"], json("b/last/manifest.json")["files"]);
  auto config_a = json("a/config.json");
  auto config_b = json("b/config.json");
  for (auto* config : {&config_a, &config_b}) {
    config->erase("model_dir");
    config->erase("vocabs");
    config->erase("time");
  }
  EXPECT_EQ(config_a, config_b);
}

TEST_F(ConfigFileTest, EveryCommandsDumpIsWhatItReads) {
  const std::string model = " --model-dir '" + path("a b") + "'";
  const std::string sets = " --test-sets " + path("valid.en") + " " + path("valid.xx");
  const std::string train = "train --train-sets x --valid-sets y" + model;
  for (const std::string& flags : std::vector<std::string>{
           "info", train, train + " --noam-factor 2 --mini-batch 8 --save-freq 3 --quiet=false",
           "translate" + model + " --n-best --beam-size 3", "evaluate" + sets + model + " --json",
           "score" + sets + model + " --normalize 0.6", "bleu -tok zh -m chrf bleu --ref x y",
           "average" + model + " --output x", "info --preset tiny --dim-vocabs 60 70"}) {
    const Ended dump = shell(nmt(flags + " --dump-config"));
    ASSERT_EQ(dump.code, 0) << flags << dump.output;
    const std::string command = flags.substr(0, flags.find(' '));
    const Ended again =
        shell(nmt(command + " --dump-config --config " + write("dump.yaml", dump.output)));
    EXPECT_EQ(again.output, dump.output) << flags;
  }
}

TEST_F(ConfigFileTest, ADumpedDefaultIsACommentThatMayBecomeAnEntry) {
  const std::string info = shell(nmt("info --dump-config")).output;
  for (const char* line : {"# preset: base", "# dim-vocabs: [32000, 32000]", "# dim-emb:"})
    EXPECT_NE(info.find(std::string("\n") + line + "\n"), std::string::npos) << line << info;
  std::string entries;
  for (const std::string& line : lines_of(info))
    if (line.find(": ") != std::string::npos) entries += line.substr(2) + "\n";
  const Ended read = shell(nmt("info --dump-config -c " + write("entries.yaml", entries)));
  expect_lines(read, {"preset: base", "dim-vocabs: [32000, 32000]", "# dim-emb:"});
}

TEST_F(ConfigFileTest, WhatNobodyGaveDoesNotActAsGiven) {
  const auto dumped = [&](const std::string& command, const std::string& more) {
    const std::string file = write("dump.yaml", shell(nmt(command + " --dump-config")).output);
    return shell(nmt(command.substr(0, command.find(' ')) + " --dump-config -c " + file + more));
  };
  const std::string train = "train --train-sets x --valid-sets y --model-dir z";
  expect_lines(dumped(train, " --learn-rate 0.001"), {"learn-rate: 0.001", "# noam-factor:"});
  // Were 64 sentences asked for, batches would be cut there.
  expect_lines(dumped(train, " --mini-batch-words 900"),
               {"mini-batch-words: 900", "# mini-batch: 0"});
  expect_lines(dumped(train + " --mini-batch 64", " --mini-batch-words 900"),
               {"mini-batch-words: 900", "mini-batch: 64"});
  const std::string evaluate = "evaluate --test-sets x --model-dir z";
  expect_lines(dumped(evaluate, " --json"), {"json: true", "# samples:"});
  expect_lines(dumped(evaluate, " --samples 3"), {"samples: 3", "# json:"});
}

TEST_F(ConfigFileTest, AFlagBeatsWhatItExcludesFurtherDown) {
  const std::string factor = write("factor.yaml", "noam-factor: 2\n");
  const std::string rate = write("rate.yaml", "learn-rate: 0.5\n");
  const std::string train = "train --train-sets x --valid-sets y --model-dir z --dump-config -c ";
  expect_lines(shell(nmt(train + factor + " --learn-rate 0.25")),
               {"learn-rate: 0.25", "# noam-factor:"});
  expect_lines(shell(nmt(train + factor + " -c " + rate)), {"learn-rate: 0.5", "# noam-factor:"});
  expect_lines(shell(nmt(train + rate + " -c " + factor)), {"noam-factor: 2", "# learn-rate:"});
  const std::string both = write("both.yaml", "noam-factor: 2\nlearn-rate: 0.5\n");
  expect_refused(train + both, "both.yaml: line ");

  const std::string samples = write("samples.yaml", "samples: 3\njson: false\n");
  const std::string evaluate = "evaluate --test-sets x --model-dir z --dump-config -c " + samples;
  expect_lines(shell(nmt(evaluate)), {"samples: 3", "# json:"});
  expect_lines(shell(nmt(evaluate + " --json")), {"json: true", "# samples:"});

  // What needs a flag goes with it.
  const std::string sampling = write("sampling.yaml", "sampling: true\nsampling-topk: 5\n");
  const std::string search = write("search.yaml", "sampling: false\n");
  const std::string translate = "translate --model-dir z --dump-config -c " + sampling;
  expect_lines(shell(nmt(translate)), {"sampling: true", "sampling-topk: 5"});
  for (const std::string& off : {std::string(" --sampling=false"), " -c " + search})
    expect_lines(shell(nmt(translate + off)), {"sampling: false", "# sampling-topk: 0"});
  const std::string topk = " --sampling-topk 5";
  expect_refused("translate --model-dir z --sampling=false" + topk,
                 "--sampling-topk requires --sampling");
  expect_refused("translate --model-dir z" + topk + " -c " + search, "requires --sampling");
}

TEST_F(ConfigFileTest, TheCommandLineWinsThenTheLaterFile) {
  const std::string first =
      write("first.yaml", "beam-size: 2\nnormalize: 0.5\nn-best: true\nmodel-dir: x\n");
  const std::string second = write("second.yaml", "normalize: 0.75\n");
  const auto dump = [&](const std::string& flags) {
    return shell(nmt("translate -c " + first + " --config " + second + " --dump-config " + flags))
        .output;
  };
  const std::string merged = dump("");
  for (const char* line : {"\nbeam-size: 2\n", "\nnormalize: 0.75\n", "\nn-best: true\n"})
    EXPECT_NE(merged.find(line), std::string::npos) << line << merged;
  const std::string changed = dump("--beam-size=5 --normalize 0 --n-best=false");
  for (const char* line : {"\nbeam-size: 5\n", "\nnormalize: 0\n", "\nn-best: false\n"})
    EXPECT_NE(changed.find(line), std::string::npos) << line << changed;
}

TEST_F(ConfigFileTest, ABadFileIsOneLineWithItsNameAndLine) {
  const auto refused = [&](const std::string& text, const std::string& expected) {
    const std::string file = write("bad.yaml", text);
    expect_refused("translate --model-dir x --config " + file,
                   expected.empty() ? file : file + expected);
  };
  refused("beam-size: 2\nbeam-szie: 3\n", ": line 2: 'beam-szie' is no flag of ");
  refused("config: other.yaml\n", ": line 1: 'config' is no flag of ");
  refused("beam-size: 2\n\nbeam-size: 3\n", ": line 3: 'beam-size' is there twice");
  refused("beam-size: [2, 3]\n", ": line 1: beam-size: expected one value");
  refused("beam-size:\n", ": line 1: beam-size: expected one value");
  refused("n-best: 2\n", ": line 1: n-best: expected true or false");
  refused("vocabs: {source: x}\n", ": line 1: vocabs: expected a value or a list of values");
  refused("beam-size: 2\n---\nbeam-size: 3\n", ": line 3: expected one document, here is a second");
  refused("- beam-size\n", ": expected lines such as mini-batch: 64");
  refused("a: [1\nb: 2\n", ": line 2: no YAML: ");
  refused("precision: auto\nbeam-size: many\n", ": line 2: --beam-size many: expected 1 to 1000");
  refused("precision: float8\n",
          ": line 1: --precision float8: expected auto, bfloat16, float32 or int8");
  expect_refused("translate --config " + path("none.yaml"), "none.yaml: cannot be read: No such");
  expect_refused("translate --config " + folder_.string(), "cannot be read: Is a directory");
  expect_refused("translate --config", "--config");
}

// What bash offers for the last of `words`.
std::vector<std::string> completed(const std::string& words) {
  const size_t count = static_cast<size_t>(std::count(words.begin(), words.end(), ' '));
  return lines_of(shell("bash -c 'source <(" + bin("cohort") + " completion bash); COMP_WORDS=(" +
                        words + "); COMP_CWORD=" + std::to_string(count) +
                        "; _cohort; printf \"%s\\n\" \"${COMPREPLY[@]}\"'")
                      .output);
}

using Words = std::vector<std::string>;

class CompletionTest : public NmtCommand {};

TEST_F(CompletionTest, BashCompletesCommandsFlagsAndValues) {
  EXPECT_EQ(completed("cohort com"), Words{"completion"});
  EXPECT_EQ(completed("cohort completion z"), Words{"zsh"});
  EXPECT_EQ(completed("cohort nmt tra"), (Words{"train", "translate"}));
  EXPECT_EQ(completed("cohort nmt translate --beam"), Words{"--beam-size"});
  EXPECT_EQ(completed("cohort nmt train --precision b"), Words{"bfloat16"});
  EXPECT_EQ(completed("cohort nmt bleu -m bleu ch"), Words{"chrf"}) << "a second value";
  EXPECT_EQ(completed("cohort run --bind-cores c"), Words{"cores"});
  EXPECT_EQ(completed("cohort run --nproc-per-node 2 -- cohort nmt eval"), Words{"evaluate"});
  EXPECT_EQ(completed("cohort nmt train --preset = t"), Words{"tiny"}) << "bash cuts words at =";
}

TEST_F(CompletionTest, BashCompletesFilesAndFolders) {
  fs::create_directory(path("runs"));
  const std::string valid = path("valid");
  EXPECT_EQ(completed("cohort nmt evaluate --test-sets " + valid + ".e"), Words{valid + ".en"});
  EXPECT_EQ(completed("cohort nmt evaluate --test-sets " + valid + ".en " + valid + ".x"),
            Words{valid + ".xx"});
  EXPECT_EQ(completed("cohort nmt train --model-dir " + path("ru")), Words{path("runs")});
  EXPECT_EQ(completed("cohort nmt train --model-dir " + path("val")), Words{""}) << "no folder";
  EXPECT_EQ(completed("cohort nmt bleu " + valid + ".e"), Words{valid + ".en"});
  EXPECT_EQ(completed("cohort checkpoint inspect " + path("ru")), Words{path("runs")});
  EXPECT_EQ(completed("cohort run -- " + valid + ".e"), Words{valid + ".en"});
}

TEST_F(CompletionTest, AProgramThatCannotStartIsNamedAndAStrangerIsLeftOut) {
  fs::copy(bin("cohort"), path("cohort"));
  const auto add = [&](const std::string& name, const std::string& text) {
    std::ofstream(path(name)) << text;
    fs::permissions(path(name), fs::perms::owner_all);
  };
  add("cohort-stranger", "#!/bin/sh\necho 'what is __flags?'\nexit 2\n");
  const Ended good = shell(path("cohort") + " completion bash");
  EXPECT_EQ(good.code, 0) << good.output;
  EXPECT_EQ(good.output.find("stranger"), std::string::npos) << good.output;
  add("cohort-broken", "#!/no/such/interpreter\n");
  const Ended broken = shell(path("cohort") + " completion bash");
  EXPECT_EQ(broken.code, 2);
  EXPECT_EQ(broken.output, "cohort: error: " + path("cohort-broken") +
                               ": expected a program that starts and tells its flags; run it to "
                               "see why not\n");
}

TEST_F(CompletionTest, EveryFlagOfEveryCommandIsThere) {
  const std::string script = shell(bin("cohort") + " completion bash").output;
  int flags = 0;
  for (const char* program : {"cohort-nmt", "cohort-bench", "cohort-doctor"}) {
    for (const std::string& line : lines_of(shell(bin(program) + " __flags").output)) {
      const auto fields = fields_of(line);
      if (fields.at(0) != "flag") continue;
      ++flags;
      const size_t table = script.find("'" + fields.at(1) + "') words=");
      ASSERT_NE(table, std::string::npos) << line;
      const std::string words = script.substr(table, script.find(";;", table) - table);
      std::istringstream names(fields.at(2));
      for (std::string name; std::getline(names, name, ',');)
        EXPECT_NE(words.find(name), std::string::npos) << line;
    }
  }
  EXPECT_GT(flags, 100);
}

TEST(BenchTest, MoreStepsBetweenSavesThanStepsAreRefused) {
  const Ended ended = shell(bin("nmt_step") + " --steps 5 --save-every 6 --save-to x");
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find("--save-every 6: expected at most half of --steps 5"),
            std::string::npos)
      << ended.output;
}

TEST(BenchTest, EveryStepIsTakenASecondTimeWithoutCommunication) {
  const Ended ended =
      shell(bin("nmt_step") +
            " --exposed-communication --steps 2 --warmup 1 --mini-batch-words 26 --rows 2 --length "
            "12 --depth 1 --vocabulary 100");
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto line = nlohmann::json::parse(ended.output);
  EXPECT_EQ(line["step_s"].size(), 2);
  EXPECT_EQ(line["step_without_communication_s"].size(), 2);
}

TEST(BenchTest, TheMedianOfAnEvenNumberIsTheMeanOfTheTwoInTheMiddle) {
  EXPECT_EQ(cohort::bench::median_of({3}), 3);
  EXPECT_EQ(cohort::bench::median_of({9, 1, 2}), 2);
  EXPECT_EQ(cohort::bench::median_of({4, 1}), 2.5);
  EXPECT_EQ(cohort::bench::median_of({10, 1, 4, 3}), 3.5);
}

// By hand: 6 FLOP a token and weight of a product, and 12 a pair of tokens and unit of width that attention compares;
// an end mark makes 12 tokens 13.
TEST(BenchTest, TheStepsWorkFollowsTheModelsSizes) {
  constexpr double width = 512, inner = 2048, sentences = 2, tokens = 13;
  for (const auto& [depth, vocabulary] : {std::pair{1, 100}, {2, 300}}) {
    const Ended ended =
        shell(bin("nmt_step") +
              " --precision float32 --steps 1 --warmup 0 --mini-batch-words 26 --rows 2 --length "
              "12 --depth " +
              std::to_string(depth) + " --vocabulary " + std::to_string(vocabulary));
    ASSERT_EQ(ended.code, 0) << ended.output;
    const double encoder_layer = 4 * width * width + 2 * width * inner;
    const double decoder_layer = 8 * width * width + 2 * width * inner;
    const double weights = depth * (encoder_layer + decoder_layer) + width * vocabulary;
    const double attention = 12 * width * 3 * depth * tokens * tokens;
    EXPECT_EQ(nlohmann::json::parse(ended.output)["flop_per_step"].get<double>(),
              sentences * (6 * tokens * weights + attention));
  }
}

TEST_F(CompletionTest, ZshAndFishTakeTheirScriptsAndComplete) {
  const std::string zsh = path("zsh");
  ASSERT_EQ(shell(bin("cohort") + " completion zsh > " + zsh + "; zsh -n " + zsh).output, "");
  // Completion proper needs a terminal; what the function offers does not.
  const std::string stubs =
      "compdef() { : }; _describe() { print -l -- ${(P)2} }; _files() { print files $@ }; "
      "compadd() { shift; print -l -- $@ }; source " +
      zsh + "; ";
  const auto offered = [&](const std::string& words, int current) {
    return shell("zsh -fc '" + stubs + "words=(" + words + "); CURRENT=" + std::to_string(current) +
                 "; _cohort'")
        .output;
  };
  EXPECT_NE(offered("cohort nmt tra", 3).find("train:Train a translator"), std::string::npos);
  EXPECT_NE(offered("cohort nmt train --pre", 4).find("--preset:Sizes"), std::string::npos);
  EXPECT_EQ(offered("cohort nmt train --preset ti", 5), "tiny\nsmall\nbase\nbig\n");
  EXPECT_EQ(offered("cohort nmt train --model-dir x", 5), "files -/\n");
  EXPECT_EQ(offered("cohort checkpoint inspect x", 4), "files\n");
  fs::rename(zsh, path("_cohort"));
  EXPECT_EQ(
      shell("zsh -fc 'compadd() { shift; print -l -- $@ }; fpath=(" + folder_.string() +
            "); autoload -U _cohort; words=(cohort nmt train --preset ti); CURRENT=5; _cohort'")
          .output,
      "tiny\nsmall\nbase\nbig\n")
      << "from a folder of functions, the first time";

  const std::string fish = path("fish");
  ASSERT_EQ(shell(bin("cohort") + " completion fish > " + fish + "; fish -n " + fish).output, "");
  const auto fished = [&](const std::string& line) {
    return shell("HOME=" + folder_.string() + " fish -c 'source " + fish + "; complete -C \"" +
                 line + "\"'")
        .output;
  };
  EXPECT_NE(fished("cohort nmt tra").find("translate\tTranslate lines"), std::string::npos);
  EXPECT_NE(fished("cohort nmt train --pres").find("--preset\tSizes"), std::string::npos);
  EXPECT_EQ(fished("cohort nmt train --preset ti"), "tiny\tSizes to start from\n");
  fs::create_directory(path("runs"));
  EXPECT_EQ(fished("cohort checkpoint inspect " + path("ru")), path("runs/") + "\n");
  expect_refused("completion", "completion");  // of cohort, not of cohort-nmt
  const Ended other = shell(bin("cohort") + " completion csh");
  EXPECT_EQ(other.code, 2);
  EXPECT_NE(other.output.find("csh: expected bash, zsh or fish"), std::string::npos)
      << other.output;
}

}  // namespace command_line_test
