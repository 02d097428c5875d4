// SPDX-License-Identifier: Apache-2.0
// Flags that are at odds with each other, with the machine, or with the run that resumes: each is
// one clear line, and nothing is silently ignored.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <span>

#include "cohort/base/stored_checkpoint.h"

#include "tests/apps/nmt_command.h"
#include "tests/support/other_flags.h"

namespace nmt_flags_test {

namespace fs = std::filesystem;
using cohort::StoredCheckpoint;
using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::shell;

class NmtFlagsTest : public cohort::test::NmtCommand {
 protected:
  Ended train(const std::string& more) const {
    return shell(bin("cohort-nmt") + " " + train_flags("run") + more);
  }
  std::vector<float> last(const std::string& part, const std::string& name) const {
    StoredCheckpoint checkpoint(path("run/last"));
    std::vector<float> values;
    const auto count = cohort::num_elements(checkpoint.part(part).at(name).shape).value();
    for (const auto bytes : checkpoint.elements(part, name, {0, count})) {
      const auto* first = reinterpret_cast<const float*>(bytes.data());
      values.insert(values.end(), first, first + bytes.size() / sizeof(float));
    }
    return values;
  }
};

TEST_F(NmtFlagsTest, FlagsThatNeedAnotherAreNotIgnored) {
  const std::string flags = train_flags("run");
  expect_refused(flags + "--workspace 100", "--workspace requires --mini-batch-fit");
  expect_refused(flags + "--keep-interval-updates 3",
                 "--keep-interval-updates 3: expected --save-interval-updates");
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}) {
    expect_refused(flags + "--cpu-offload --strategy " + strategy,
                   "--cpu-offload: this run computes on the CPU, where there is nothing to "
                   "offload: leave it out, or choose a --device");
  }
  EXPECT_FALSE(fs::exists(path("run")));
}

// Ranks with other options would average gradients and then update differently, or wait for each other.
TEST_F(NmtFlagsTest, RanksWithOtherFlagsAreRefused) {
  cohort::test::expect_other_flags_refused(bin("cohort-nmt") + " " + train_flags("run"),
                                           "--clip-norm", "1", "2");
  EXPECT_FALSE(fs::exists(path("run/last")));
  // What a rank shows of itself is its own affair.
  const Ended ended =
      shell(bin("cohort") + " run --nproc-per-node 2 -- sh -c 'exec " + bin("cohort-nmt") + " " +
            train_flags("run") +
            "--after-batches 2 --log-level $([ $RANK = 0 ] && echo info || echo warn)'");
  EXPECT_EQ(ended.code, 0) << ended.output;
}

// Each rank sees another folder, or other files, under the same path.
TEST_F(NmtFlagsTest, RanksWithOtherFilesAreRefused) {
  ASSERT_EQ(train("--after-batches 2").code, 0);
  for (const std::string rank : {"0", "1"}) fs::create_directory(path(rank));
  fs::create_directory(path("seen"));
  const auto seen = [&](const std::string& command) {
    return shell(bin("cohort") + " run --nproc-per-node 2 -- unshare -m sh -c 'mount --bind " +
                 path("") + "$RANK " + path("seen") + " && exec " + bin("cohort-nmt") + " " +
                 command + "'");
  };
  const auto refused = [&](const std::string& command, const std::string& text) {
    const Ended ended = seen(command);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text + " on all ranks, ranks 0 and 1 differ"), std::string::npos)
        << ended.output;
  };
  // Rank 1 has more sentences, and as many tokens in a batch as make several.
  ASSERT_EQ(shell("cd " + path("") +
                  "; head -5 valid.en > 0/en; head -5 valid.xx > 0/xx; "
                  "cp valid.en 1/en; cp valid.xx 1/xx; cp -r run 0/run; cp -r run 1/run")
                .code,
            0);
  const std::string test =
      " --test-sets " + path("seen/en") + " " + path("seen/xx") + " --valid-mini-batch-words 20";
  refused("evaluate --model-dir " + path("run") + test,
          "evaluation: expected the same text and vocabularies");
  std::string valid = train_flags("other");
  for (const std::string side : {"en", "xx"})
    valid.replace(valid.find(path("valid." + side)), path("valid." + side).size(),
                  path("seen/" + side));
  refused(valid, "--valid-sets: expected the same text");
  EXPECT_FALSE(fs::exists(path("other")));
  // As many sentences, another reference; another model.
  ASSERT_EQ(shell("cd " + path("") + "; cp 0/en 1/en; sed 1s/^/x/ 0/xx > 1/xx").code, 0);
  refused("evaluate --model-dir " + path("run") + test,
          "evaluation: expected the same text and vocabularies");
  ASSERT_EQ(shell("cp " + path("0/xx") + " " + path("1/xx")).code, 0);
  EXPECT_EQ(seen("evaluate --model-dir " + path("seen/run") + test).code, 0);
  const std::string more = train_flags("1/run");
  ASSERT_EQ(shell(bin("cohort-nmt") + " " + more + "--after-batches 4").code, 0);
  refused("evaluate --model-dir " + path("seen/run") + test,
          "--model-dir: expected the same weights");
}

TEST_F(NmtFlagsTest, AProfileHasTheUpdatesAskedFor) {
  const std::string flags = "--after-batches 5 --profile " + path("trace.json");
  ASSERT_EQ(train(flags + " --profile-skip 2 --profile-steps 2 ").code, 0);
  const std::string trace = contents(path("trace.json"));
  ASSERT_TRUE(nlohmann::json::parse(trace).contains("traceEvents"));
  for (int update = 0; update < 5; ++update) {
    EXPECT_EQ(trace.find("\"ProfilerStep#" + std::to_string(update) + '"') != std::string::npos,
              update == 2 || update == 3)
        << update;
  }
  for (const char* name : {"\"forward\"", "\"backward\"", "\"Optimizer.step\""})
    EXPECT_NE(trace.find(name), std::string::npos) << name;
  // One that skips more than the run has is told so, and the run is saved all the same.
  const Ended late = train(flags + "2 --profile-skip 100 --overwrite ");
  EXPECT_EQ(late.code, 2);
  EXPECT_NE(late.output.find("trace.json2: the loop ended after 5 steps"), std::string::npos)
      << late.output;
  EXPECT_TRUE(fs::exists(path("run/last")));
  expect_refused(train_flags("other") + "--profile-steps 3", "--profile-steps requires --profile");
  expect_refused(train_flags("other") + "--profile " + path("none/trace.json"),
                 "none: No such file or directory");
}

TEST_F(NmtFlagsTest, RatesAreOfASensibleSize) {
  std::string flags = train_flags("run");
  flags.erase(flags.find("--learn-rate 5e-3"), 17);
  expect_refused(flags + "--learn-rate 1e30",
                 "--learn-rate 1e30: expected a number above 0 and at most 100");
  expect_refused(flags + "--learn-rate 101", "--learn-rate 101: expected");
  expect_refused(flags + "--noam-factor 1e30",
                 "--noam-factor 1e30: expected a number above 0 and at most");
}

// The default, once given and once not, and others: of the same updates, other weights.
TEST_F(NmtFlagsTest, AdamsParametersAreTheFlags) {
  const auto weights = [&](const std::string& more) {
    EXPECT_EQ(train("--after-batches 2 --overwrite " + more).code, 0);
    return last("weights", "generator.weight");
  };
  const auto recorded = [&] {
    return nlohmann::json::parse(contents(path("run/config.json")))["optimizer_params"];
  };
  const auto usual = weights("");
  EXPECT_EQ(recorded(), nlohmann::json::parse("[0.9, 0.98, 1e-9]"));
  EXPECT_EQ(weights("--optimizer-params 0.9 0.98 1e-9"), usual);
  for (const char* params : {"0.5 0.98 1e-9", "0.9 0.5 1e-9", "0.9 0.98 1e-2"})
    EXPECT_NE(weights("--optimizer-params " + std::string(params)), usual) << params;
  EXPECT_EQ(recorded(), nlohmann::json::parse("[0.9, 0.98, 0.01]"));
  const std::string flags = train_flags("other") + "--optimizer-params ";
  for (const char* params : {"1 0.98 1e-09", "0.9 -0.5 1e-09", "0.9 0.98 0"}) {
    expect_refused(flags + params,
                   "--optimizer-params " + std::string(params) +
                       ": expected beta1 and beta2 of 0 to below 1, and epsilon above 0");
  }
  expect_refused(flags + "0.9 0.98", "--optimizer-params: ");
}

// Update 5 takes its parameters into the average at a rate of 9 / (5 + 9).
TEST_F(NmtFlagsTest, AnAverageThatIsNewToARunBeginsAtItsWeights) {
  ASSERT_EQ(train("--after-batches 4 ").code, 0);
  const std::string name = "generator.weight";
  const auto before = last("weights", name);
  const Ended on = train("--after-batches 5 --exponential-smoothing 0.01");
  EXPECT_EQ(on.code, 0) << on.output;
  EXPECT_NE(on.output.find("--exponential-smoothing is new to this run: the average starts from"),
            std::string::npos)
      << on.output;
  const auto after = last("weights", name), average = last("average", name);
  ASSERT_EQ(average.size(), before.size());
  double moved = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    // Two roundings of numbers below 1.
    EXPECT_NEAR(average[i], before[i] + 9. / 14 * (after[i] - before[i]), 1e-6);
    moved = std::max<double>(moved, std::abs(after[i] - before[i]));
  }
  EXPECT_GT(moved, 1e-4);

  const Ended same = train("--after-batches 6 --exponential-smoothing 0.01");
  EXPECT_EQ(same.code, 0) << same.output;
  EXPECT_EQ(same.output.find("is new to this run"), std::string::npos) << same.output;
  const Ended off = train("--after-batches 7");
  EXPECT_EQ(off.code, 0) << off.output;
  EXPECT_NE(off.output.find("--exponential-smoothing is no longer given: the average is dropped"),
            std::string::npos)
      << off.output;
  const auto parts = StoredCheckpoint(path("run/last")).parts();
  EXPECT_EQ(std::count(parts.begin(), parts.end(), "average"), 0);
}

TEST_F(NmtFlagsTest, BeforeTheFirstValidationTheLogHasNoNumbersThatAreNone) {
  const Ended ended = train("--after-batches 1 --valid-on-start");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("train_loss=none"), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("nan"), std::string::npos) << ended.output;
}

// sacreBLEU's default, wherever a score is computed; where that says little, a warning says so.
TEST_F(NmtFlagsTest, BleuIsThatOf13aUnlessAnotherTokenizerIsGiven) {
  std::ofstream(path("valid.zh")) << [] {
    std::string lines;
    for (int i = 0; i < 40; ++i) lines += "\u7EA2\u732B\n";
    return lines;
  }();
  const auto without_tokenize = [&](const std::string& run, const std::string& references) {
    std::string flags = train_flags(run);
    flags.erase(flags.find("--tokenize 13a "), 15);
    flags.replace(flags.find("valid.xx"), 8, references);
    return shell(bin("cohort-nmt") + " " + flags + "--after-batches 1");
  };
  const auto evaluate = [&](const std::string& references, const std::string& more) {
    return shell(bin("cohort-nmt") + " evaluate --model-dir " + path("a") + " --test-sets " +
                 path("valid.en") + " " + path(references) + more);
  };
  const auto bleu = [&](const std::string& references, const std::string& more) {
    return shell(bin("cohort-nmt") + " bleu " + path(references) + " < " + path(references) + more);
  };
  const Ended trained = without_tokenize("a", "valid.xx");
  ASSERT_EQ(trained.code, 0) << trained.output;
  EXPECT_EQ(nlohmann::json::parse(contents(path("a/config.json")))["tokenize"], "13a");
  const std::string warning = "--tokenize 13a: the references are Chinese";
  for (const auto& [plain, chinese, right] :
       {std::tuple{evaluate("valid.xx", ""), evaluate("valid.zh", ""),
                   evaluate("valid.zh", " --tokenize zh")},
        std::tuple{bleu("valid.xx", ""), bleu("valid.zh", ""),
                   bleu("valid.zh", " --tokenize zh")}}) {
    EXPECT_NE(plain.output.find("|tok:13a|"), std::string::npos) << plain.output;
    EXPECT_EQ(plain.output.find(warning), std::string::npos) << plain.output;
    EXPECT_NE(chinese.output.find("|tok:13a|"), std::string::npos) << chinese.output;
    EXPECT_NE(chinese.output.find(warning), std::string::npos) << chinese.output;
    EXPECT_NE(right.output.find("|tok:zh|"), std::string::npos) << right.output;
    EXPECT_EQ(right.output.find(warning), std::string::npos) << right.output;
  }
  EXPECT_EQ(trained.output.find(warning), std::string::npos) << trained.output;
  const Ended warned = without_tokenize("b", "valid.zh");
  ASSERT_EQ(warned.code, 0) << warned.output;
  EXPECT_NE(warned.output.find(warning), std::string::npos) << warned.output;
}

// Room for the vocabularies, none for the tokens; no room for anything. The launcher shows no stack
// of it.
TEST_F(NmtFlagsTest, AFullDiskAtTheStartIsOneLineOfEachRank) {
  const std::string disk = path("disk");
  fs::create_directory(disk);
  for (const char* room : {"0", "20k"}) {
    const Ended ended =
        shell("unshare -m sh -c 'mount -t tmpfs -o size=1m none " + disk +
              " && { dd if=/dev/zero of=" + disk + "/fill bs=1k 2> /dev/null; truncate -s -" +
              room + " " + disk + "/fill; " + on_ranks(2, train_flags("disk/run")) +
              "; echo code $?; find " + disk + " -type f; }'");
    EXPECT_NE(ended.output.find("[rank 0/2] cohort nmt: error: " + disk + "/run/"),
              std::string::npos)
        << ended.output;
    EXPECT_NE(ended.output.find("cannot write: No space left on device\n"), std::string::npos);
    EXPECT_EQ(ended.output.find("raised at"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("frame #"), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("code 1\n" + disk + "/fill\n"), std::string::npos)
        << "nothing half-written: " << ended.output;
  }
}

}  // namespace nmt_flags_test
