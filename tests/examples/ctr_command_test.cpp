// SPDX-License-Identifier: Apache-2.0
// The ctr program as a user runs it, on data that it makes up.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <sstream>
#include <tuple>

#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace ctr_command_test {

using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

// The number behind `name` in the last line that has it.
double number_after(const std::string& text, const std::string& name) {
  const size_t at = text.rfind(name);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size());
}

class CtrCommandTest : public testing::Test {
 protected:
  std::string train(const std::string& more) const {
    return bin("ctr") + " train --data " + folder_ / "data" + " --rows 30000 --batch 256 " + more;
  }
  std::string through_servers(int servers, int trainers, const std::string& more) const {
    return bin("cohort") + " run --servers " + std::to_string(servers) + " --trainers " +
           std::to_string(trainers) + " -- " + train(more);
  }
  double auc_of(const std::string& command) const {
    const Ended ended = shell(command);
    EXPECT_EQ(ended.code, 0) << command << "\n" << ended.output;
    return number_after(ended.output, "AUC ");
  }
  // Makes up `rows` examples in the folder "data"; returns the file to train on.
  std::string generated(int rows) const {
    const Ended ended = shell(bin("ctr") + " generate --rows " + std::to_string(rows) +
                              " --output " + folder_ / "data");
    EXPECT_EQ(ended.code, 0) << ended.output;
    return folder_ / "data/train.tsv";
  }
  // What sed's `script` makes of that file, in one of its own.
  std::string edited(const std::string& name, const std::string& script) const {
    const std::string file = folder_ / name + ".tsv";
    EXPECT_EQ(shell("sed '" + script + "' " + folder_ / "data/train.tsv" + " > " + file).code, 0);
    return file;
  }
  void expect_refused(const std::string& command, const std::string& text) const {
    const Ended ended = shell(command);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }

  const TemporaryFolder folder_;
};

TEST_F(CtrCommandTest, LearnsSavesEvaluatesAndPredictsAlone) {
  const Ended trained = shell(train("--save " + folder_ / "saved"));
  ASSERT_EQ(trained.code, 0) << trained.output;
  EXPECT_NE(trained.output.find("making up 30000 examples"), std::string::npos);
  const double auc = number_after(trained.output, "AUC ");
  // Guessing gives 0.5; the numbers alone about 0.6.
  EXPECT_GT(auc, 0.62) << trained.output;
  EXPECT_GT(number_after(trained.output, " of "), auc) << "nobody beats the truth";
  const Ended evaluated =
      shell(bin("ctr") + " evaluate --data " + folder_ / "data" + " --load " + folder_ / "saved");
  EXPECT_EQ(evaluated.code, 0) << evaluated.output;
  EXPECT_EQ(evaluated.output.substr(evaluated.output.find("test: AUC")),
            trained.output.substr(trained.output.find("test: AUC")));
  // With labels and without: the same probabilities.
  const std::string lines = cohort::read_file(folder_ / "data/test.tsv");
  ASSERT_EQ(shell("cut -f 2- " + folder_ / "data/test.tsv" + " > " + folder_ / "unlabelled").code,
            0);
  for (const auto& [input, output] : {std::pair{"data/test.tsv", "one"}, {"unlabelled", "two"}}) {
    const Ended predicted = shell(bin("ctr") + " predict --load " + folder_ / "saved" +
                                  " --input " + folder_ / input + " --output " + folder_ / output);
    EXPECT_EQ(predicted.code, 0) << predicted.output;
  }
  const std::string predictions = cohort::read_file(folder_ / "one");
  EXPECT_EQ(predictions, cohort::read_file(folder_ / "two"));
  std::istringstream stream(predictions);
  int count = 0;
  for (double p = 0; stream >> p; ++count) EXPECT_TRUE(p > 0 && p < 1);
  EXPECT_EQ(count, 3000);
}

// The launcher shows no stack of it.
TEST_F(CtrCommandTest, AFullDiskIsOneLineWhereverTheCheckpointIsWritten) {
  const std::string disk = folder_ / "disk";
  std::filesystem::create_directory(disk);
  const std::string flags = "--max-steps 20 --save " + disk + "/saved";
  for (const std::string& command :
       {train(flags), bin("cohort") + " run -- " + train(flags), through_servers(1, 1, flags)}) {
    const Ended ended = shell("unshare -m sh -c 'mount -t tmpfs -o size=64k none " + disk +
                              " && { " + command + "; }'");
    EXPECT_EQ(ended.code, 1) << command << "\n" << ended.output;
    EXPECT_NE(ended.output.find("ctr: error: server 0 ("), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("No space left on device"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("raised at"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("frame #"), std::string::npos) << ended.output;
  }
}

TEST_F(CtrCommandTest, TrainersLearnThroughServersInEveryMode) {
  // Without its numbers an example is its categories alone: what is learned is in the rows.
  generated(30000);
  std::string files;
  for (const std::string name : {"train", "test"}) {
    const std::string file = folder_ / name + ".tsv";
    ASSERT_EQ(shell("awk 'BEGIN {FS = OFS = \"\\t\"} {for (i = 2; i <= 14; ++i) $i = \"\"; "
                    "print}' " +
                    folder_ / "data/" + name + ".tsv > " + file)
                  .code,
              0);
    files += " --" + name + " " + file;
  }
  files += " --row-lr 0.02 --epochs 2";
  const double alone = auc_of(train(files));
  // Rows that nobody makes: guessing, which gives 0.5, give or take 0.01.
  EXPECT_NEAR(auc_of(train(files + " --admit-after 256")), 0.5, 0.03);
  for (const std::string mode : {"sync", "async", "half-async", "geo"}) {
    const std::string own = mode == "half-async" ? " --max-merge 2"
                            : mode == "geo"      ? " --geo-steps 5"
                                                 : "";
    // Two trainers take half as many steps.
    EXPECT_GT(auc_of(through_servers(2, 2, files + own + " --mode " + mode)),
              mode == "sync" ? alone - 0.05 : 0.58)
        << mode;
  }
  // Rounding at random adds noise to each gradient, none to their mean: less than the 0.03 above.
  EXPECT_NEAR(auc_of(train(files + " --wire-dtype bfloat16")), alone, 0.01);
  EXPECT_GT(auc_of(through_servers(2, 2, files + " --mode sync --wire-dtype bfloat16")),
            alone - 0.05);
  EXPECT_NEAR(auc_of(train(files + " --precision bfloat16")), alone, 0.01);
}

TEST_F(CtrCommandTest, OneTrainerThroughServersInSyncIsLocalTraining) {
  const auto last_line = [](const std::string& command) {
    const Ended ended = shell(command);
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output.substr(std::min(ended.output.size(), ended.output.rfind("test: AUC")));
  };
  const std::string alone = last_line(train("--max-steps 40"));
  EXPECT_EQ(last_line(through_servers(1, 1, "--max-steps 40 --mode sync")), alone);
  EXPECT_EQ(last_line(through_servers(2, 1, "--max-steps 40")), alone);
}

// An epoch begins with what all steps before it have made, also where no evaluation has pulled it.
TEST_F(CtrCommandTest, AnEvaluationBetweenEpochsChangesNothing) {
  generated(4000);
  const std::string test = " --test " + folder_ / "data/test.tsv";
  const auto evaluated_after = [&](const std::string& flags) {
    const Ended trained =
        shell(bin("ctr") + " train --epochs 3 --batch 400 --train " + folder_ / "data/train.tsv" +
              flags + " --save " + folder_ / "saved");
    EXPECT_EQ(trained.code, 0) << trained.output;
    const Ended ended = shell(bin("ctr") + " evaluate --load " + folder_ / "saved" + test);
    EXPECT_EQ(ended.code, 0) << ended.output;
    std::filesystem::remove_all(folder_ / "saved");
    return ended.output.substr(std::min(ended.output.size(), ended.output.find("test: AUC")));
  };
  const std::string with_evaluations = evaluated_after(test);
  EXPECT_NE(with_evaluations, "");
  EXPECT_EQ(evaluated_after(""), with_evaluations);
}

// 300 lines on end are five blocks of 16 KiB: one share has three of them, the other two.
// Trainer 1 is killed twice, where trainer 0 has said that it has made some steps. The rows and
// parameters that are saved are those of a run that nobody disturbed.
TEST_F(CtrCommandTest, KilledTrainersGoOnWithinTheEpochWithTheSameBits) {
  generated(30000);
  const auto files_of = [&](const std::string& saved) {
    const Ended ended = shell(bin("cohort-ps") + " export " + folder_ / saved + " --output " +
                              folder_ / saved + "-export");
    EXPECT_EQ(ended.code, 0) << ended.output;
    return cohort::read_file(folder_ / saved + "-export/dense.safetensors") +
           cohort::read_file(folder_ / saved + "-export/categories.safetensors");
  };
  const std::string flags = "--mode sync --epochs 2 -p 5 --save ";
  ASSERT_EQ(shell(through_servers(2, 2, flags + folder_ / "calm")).code, 0);
  for (const std::string policy : {"group", "single"}) {
    const Ended ended = shell(
        bin("cohort") + " run --servers 2 --trainers 2 --grace 1 --max-restarts 2 --log-dir " +
        folder_ / policy + "-logs --restart-policy " + policy + " -- sh -c '" +
        "if [ $RANK = 1 ] && [ $COHORT_RESTART_COUNT -lt 2 ]; then (until [ $(grep -c \"step\" "
        "$COHORT_LOG_DIR/rank0.stdout.log) -gt $((10 * COHORT_RESTART_COUNT + 1)) ]; do sleep "
        "0.01; "
        "done; kill -9 $$) & fi; exec " +
        train(flags + folder_ / policy) + "'");
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("restart 2 of 2"), std::string::npos) << ended.output;
    EXPECT_TRUE(files_of(policy) == files_of("calm")) << policy;
    const std::string log = cohort::read_file(folder_ / policy + "-logs/rank1.stdout.log");
    if (policy == "single") {
      EXPECT_NE(log.find("resumes after step"), std::string::npos) << log;
    } else {
      EXPECT_NE(ended.output.find("resumes after step"), std::string::npos) << ended.output;
    }
  }
}

// It had left the servers when it was killed: nothing is trained twice.
TEST_F(CtrCommandTest, ATrainerThatIsKilledWhenItIsDoneDoesNotBeginOnceMore) {
  generated(30000);
  const Ended ended = shell(
      bin("cohort") + " run --servers 2 --trainers 2 --max-restarts 1 --restart-policy single " +
      "--log-dir " + folder_ / "logs" + " -- sh -c '" + train("--mode sync --epochs 2 -p 5") +
      "; if [ $RANK$COHORT_RESTART_COUNT = 10 ]; then kill -9 $$; fi'");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("restart 1 of 1"), std::string::npos) << ended.output;
  const std::string log = cohort::read_file(folder_ / "logs/rank1.stdout.log");
  const size_t again = log.find("epoch 2 is complete after step");
  ASSERT_NE(again, std::string::npos) << log;
  EXPECT_EQ(log.find("step", log.find('\n', again)), std::string::npos) << log;
}

// Whichever trainer is lost, the others finish, and the first of them evaluates.
TEST_F(CtrCommandTest, TrainersGoOnWithoutOneThatIsLost) {
  generated(30000);
  for (const std::string lost : {"0", "1"}) {
    const std::string logs = folder_ / ("logs" + lost);
    const Ended ended =
        shell(bin("cohort") + " run --servers 2 --trainers 2 --on-trainer-loss continue " +
              "--server-arg=--trainer-timeout=5 --log-dir " + logs + " -- sh -c '" +
              "if [ $RANK = " + lost + " ]; then (until grep -q step " + logs +
              "/rank0.stdout.log; do sleep 0.01; done; kill -9 $$) & fi; exec " +
              train("--mode sync --epochs 2 -p 5") + "'");
    EXPECT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("rank " + lost + " "), std::string::npos) << ended.output;
    EXPECT_NE(ended.output.find("the others continue without it"), std::string::npos)
        << ended.output;
    const std::string first = lost == "0" ? "1" : "0";
    const std::string log = cohort::read_file(logs + "/rank" + first + ".stdout.log");
    EXPECT_GT(number_after(log, "AUC "), 0.6) << log;
  }
}

TEST_F(CtrCommandTest, WhatStartsAgainAloneIsRefusedWhereItCannot) {
  const std::string single = " run --restart-policy single ";
  expect_refused(bin("cohort") + single + "-- true",
                 "--restart-policy: expected group, or --servers beside it");
  expect_refused(
      bin("cohort") + single + "--servers 1 --trainers 2 -- " + train("--mode half-async"),
      "--mode half-async: expected sync or async");
  // These trainers have no process group.
  for (const std::string flag : {"--timeout 30", "--port 29500", "--interface lo"}) {
    expect_refused(bin("cohort") + single + "--servers 1 --trainers 2 -- " + train(flag),
                   "expected none of them, this process has no process group");
  }
  expect_refused(bin("cohort") + " run --on-trainer-loss continue -- true", "--on-trainer-loss");
}

TEST_F(CtrCommandTest, DamagedLinesAreLeftOutAndNobodyWaits) {
  generated(2000);
  const std::string files = " train --batch 8 --skip-damaged --train " +
                            edited("damaged", "1001,1300s/^./x/") + " --test " +
                            folder_ / "data/test.tsv";
  const Ended ended =
      shell(bin("cohort") + " run --servers 1 --trainers 2 -- " + bin("ctr") + files);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find(" malformed lines\n"), std::string::npos) << ended.output;
}

TEST_F(CtrCommandTest, ACheckpointOfTwoServersLoadsInOneProcess) {
  const Ended trained = shell(through_servers(2, 1, "--max-steps 40 --save " + folder_ / "saved"));
  ASSERT_EQ(trained.code, 0) << trained.output;
  const Ended evaluated =
      shell(bin("ctr") + " evaluate --data " + folder_ / "data" + " --load " + folder_ / "saved");
  EXPECT_EQ(evaluated.code, 0) << evaluated.output;
  EXPECT_EQ(evaluated.output.substr(evaluated.output.find("test: AUC")),
            trained.output.substr(trained.output.find("test: AUC")));
}

// Both sides show a certificate of one authority.
TEST_F(CtrCommandTest, TrainsThroughServersUnderTls) {
  const auto pem = [&](const std::string& name) { return folder_ / name + ".pem"; };
  const auto key = [&](const std::string& name) { return folder_ / name + ".key"; };
  const std::string request = " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=";
  ASSERT_EQ(shell("openssl req -x509 -days 1" + request + "authority -keyout " + key("authority") +
                  " -out " + pem("authority"))
                .code,
            0);
  for (const std::string name : {"cohort-server", "cohort-trainer"}) {
    const std::string extension = folder_ / name + ".ext";
    cohort::write_file(extension, "subjectAltName=DNS:" + name + "\n");
    const Ended issued =
        shell("openssl req" + request + name + " -keyout " + key(name) +
              " | openssl x509 -req -days 1 -CAcreateserial -CA " + pem("authority") + " -CAkey " +
              key("authority") + " -extfile " + extension + " -out " + pem(name));
    ASSERT_EQ(issued.code, 0) << issued.output;
  }
  std::string launch = bin("cohort") + " run --servers 1 --trainers 1";
  std::string flags;
  for (const auto& [flag, of_server, of_trainer] :
       {std::tuple{"--tls-authority=", pem("authority"), pem("authority")},
        {"--tls-certificate=", pem("cohort-server"), pem("cohort-trainer")},
        {"--tls-key=", key("cohort-server"), key("cohort-trainer")}}) {
    launch += std::string(" --server-arg=") + flag + of_server;
    flags += std::string(" ") + flag + of_trainer;
  }
  const Ended trained = shell("timeout 200 " + launch + " -- " + train("--max-steps 2" + flags));
  EXPECT_EQ(trained.code, 0) << trained.output;
  EXPECT_NE(trained.output.find("test: AUC "), std::string::npos) << trained.output;
  expect_refused(train("--mode local" + flags), "expected another --mode than local");
}

// The run is killed between writing an epoch's checkpoint and writing epoch.json, which then names the
// epoch before.
TEST_F(CtrCommandTest, ARestartedRunTrainsNoEpochTwice) {
  const std::string saved = folder_ / "saved", said = saved + "/epoch.json";
  const auto run = [&](int restart, int epochs) {
    const Ended ended =
        shell("COHORT_JOB_ID=job COHORT_RESTART_COUNT=" + std::to_string(restart) + " " +
              train("--mode local --save " + saved + " --epochs " + std::to_string(epochs)));
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  run(0, 1);
  const std::string after_first = cohort::read_file(said);
  EXPECT_NE(run(1, 2).find("epoch 2: "), std::string::npos);
  cohort::write_file(said, after_first);
  const std::string again = run(2, 3);
  EXPECT_EQ(again.find("epoch 2: "), std::string::npos) << again;
  EXPECT_NE(again.find("epoch 3: "), std::string::npos) << again;
}

// The servers resume an earlier job, which has more steps than this run makes. All trainers say so,
// with a group or without; one that never pushed learns it from the servers. A run that ends at that
// step still scores and saves.
TEST_F(CtrCommandTest, ARunThatEndsBeforeTheServersStepsIsRefused) {
  generated(2000);
  const std::string launch = "timeout 60 " + bin("cohort") + " run --servers 1 --log-dir ";
  const std::string ctr = bin("ctr") + " train --data " + folder_ / "data";
  const std::string refusal =
      "--epochs 1: expected 2 or more: the servers' trainers have come to step 30, and this run, "
      "of 15 steps in an epoch, ends at step 15;";
  const std::string saved = folder_ / "saved";
  int job = 0;
  for (const auto& [flags, mode, first_program] :
       {std::tuple{"", "sync", ""},
        {"", "async", ""},
        {"--restart-policy single", "sync", ""},
        {"--on-trainer-loss continue", "async", "sh -c '[ $RANK = 0 ] && exec \"$@\"' - "}}) {
    const std::string logs = folder_ / ("logs" + std::to_string(job++));
    const std::string run = launch + logs + " --trainers 2 " + flags + " -- ";
    const std::string train = ctr + " --batch 64 --mode " + mode + " --save " + saved;
    const Ended first = shell(run + first_program + train + " --epochs 2");
    ASSERT_EQ(first.code, 0) << first.output;
    std::filesystem::remove_all(saved);
    expect_refused(run + train + " --epochs 1", refusal);
    for (const std::string rank : {"0", "1"}) {
      const std::string log = cohort::read_file(logs + "/rank" + rank + ".stderr.log");
      EXPECT_NE(log.find(refusal), std::string::npos) << flags << " rank " << rank << "\n" << log;
    }
    EXPECT_FALSE(std::filesystem::exists(saved)) << flags;
    if (*flags != '\0') continue;
    const Ended again = shell(run + train + " --epochs 2");
    EXPECT_EQ(again.code, 0) << again.output;
    EXPECT_NE(again.output.find("epoch 2 is complete after step "), std::string::npos)
        << again.output;
    EXPECT_NE(again.output.find("test: AUC "), std::string::npos) << again.output;
    EXPECT_TRUE(std::filesystem::exists(saved + "/checkpoint"));
    std::filesystem::remove_all(saved);
  }
}

// Steps of another size are other examples: some would be left out, or learned twice.
TEST_F(CtrCommandTest, AnotherBatchThanTheResumedJobsIsRefused) {
  generated(2000);
  const std::string run = "timeout 60 " + bin("cohort") +
                          " run --servers 1 --trainers 1 --log-dir " + folder_ / "logs" + " -- " +
                          bin("ctr") + " train --data " + folder_ / "data" + " --epochs 2 --batch ";
  ASSERT_EQ(shell(run + "64 --max-steps 10").code, 0);
  expect_refused(run + "32", "/batch_size is 64, this trainer's 32");
  expect_refused(run + "128", "/batch_size is 64, this trainer's 128");
}

// As docs/launch.md has it for trainers and servers that no launcher started.
TEST_F(CtrCommandTest, OneTrainerStartedByHandNeedsNoEndpointsOfTrainers) {
  const std::string port = folder_ / "port";
  const Ended trained = shell(
      "timeout 250 " + bin("cohort-ps") + " server --endpoint 127.0.0.1:0 --port-file " + port +
      " --folder " + folder_ / "state" + " & server=$!; for i in $(seq 1200); do [ -s " + port +
      " ] && break; sleep 0.05; done; PADDLE_TRAINING_ROLE=TRAINER PADDLE_TRAINERS_NUM=1" +
      " PADDLE_TRAINER_ID=0 PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:$(cat " + port +
      ") timeout 150 " + train("--max-steps 2") + "; code=$?; kill $server; exit $code");
  EXPECT_EQ(trained.code, 0) << trained.output;
  EXPECT_NE(trained.output.find("test: AUC "), std::string::npos) << trained.output;
}

TEST_F(CtrCommandTest, WithoutExamplesThereIsNothingToLearnOrToScore) {
  const std::string good = generated(300);
  const std::string empty = folder_ / "empty.tsv";
  const std::string damaged = edited("damaged", "s/^/x/");
  cohort::write_file(empty, "");
  const std::string alone = bin("ctr") + " train --skip-damaged ";
  const std::string together =
      "timeout 60 " + bin("cohort") + " run --servers 1 --trainers 2 -- " + alone;
  const std::string small = "--batch 8 --train ";
  for (const std::string& command : {alone + small, together + small}) {
    expect_refused(command + empty, "--train " + empty + ": expected examples, got an empty file");
    expect_refused(command + good + " --test " + empty,
                   "--test " + empty + ": expected examples, got an empty file");
    expect_refused(command + damaged,
                   "--train " + damaged + ": expected examples, got 300 malformed lines alone");
    expect_refused(command + good + " --test " + damaged,
                   "--test " + damaged + ": expected examples, got malformed lines alone");
  }
  expect_refused(together + "--batch 400 --train " + good,
                 "got fewer lines than one --batch 400 for each of 2 trainers");
  expect_refused(alone + small + good + " --test " + edited("one", "s/^/x/; q"),
                 "got malformed lines alone");
  // Of two blocks of 16 KiB, one trainer's has no good line.
  const Ended half = shell(together + small + edited("half", "1,80s/^/x/; 120q"));
  EXPECT_EQ(half.code, 0) << half.output;
  EXPECT_NE(half.output.find("epoch 1: 40 examples"), std::string::npos) << half.output;
  EXPECT_GT(number_after(half.output, "log-loss "), 0) << half.output;
  // Of one label there is no AUC.
  const Ended clicks = shell(alone + small + good + " --test " + edited("clicks", "/^1/!d"));
  EXPECT_EQ(clicks.code, 0) << clicks.output;
  EXPECT_NE(clicks.output.find("AUC undefined"), std::string::npos) << clicks.output;
}

// Trainers without a process group know of each other's examples by the files alone.
TEST_F(CtrCommandTest, ATrainerWithoutAnExampleEndsNoJobOfTrainersOnTheirOwn) {
  const std::string good = generated(300);
  const std::string damaged = edited("damaged", "s/^/x/");
  // Of two blocks of 16 KiB, one trainer's has no good line.
  const std::string half = edited("half", "1,80s/^/x/; 120q");
  for (const std::string policy : {"--restart-policy single", "--on-trainer-loss continue"}) {
    const std::string together = "timeout 60 " + bin("cohort") + " run --servers 1 --trainers 2 " +
                                 policy + " --tee all -- " + bin("ctr") + " train --skip-damaged ";
    const Ended ended = shell(together + "--batch 8 --train " + half);
    EXPECT_EQ(ended.code, 0) << policy << "\n" << ended.output;
    EXPECT_NE(ended.output.find("epoch 1: 40 examples"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("continue without it"), std::string::npos) << ended.output;
    if (policy == "--on-trainer-loss continue") continue;  // Of all trainers that refuse, too.
    expect_refused(together + "--batch 8 --train " + damaged,
                   "--train " + damaged + ": expected examples, got 300 malformed lines alone");
    expect_refused(together + "--batch 400 --train " + good,
                   "got fewer lines than one --batch 400 for each of 2 trainers");
  }
}

TEST_F(CtrCommandTest, AnUnwritableCheckpointIsRefusedBeforeTraining) {
  generated(2000);
  const std::string file = folder_ / "file";
  cohort::write_file(file, "");
  // The last one is there, but nobody can write to it.
  for (const auto& [command, folder] : {std::pair{train(""), file + "/saved"},
                                        {through_servers(1, 2, ""), file + "/saved"},
                                        {train(""), std::string("/proc")}}) {
    const Ended ended = shell(command + "--save " + folder);
    EXPECT_EQ(ended.output.find(".trial"), std::string::npos) << ended.output;
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(folder == "/proc" ? folder : file), std::string::npos)
        << ended.output;
    EXPECT_EQ(ended.output.find("epoch 1"), std::string::npos) << ended.output;
  }
}

TEST_F(CtrCommandTest, ARefusedRunLeavesNoFolders) {
  const std::string too_long = folder_ / "a/" + std::string(300, 'x');
  expect_refused(train("--save " + too_long + "/b"), "--save " + too_long + ": expected a folder");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "data")) << "made before the refusal";
  expect_refused(bin("ctr") + " train --save " + folder_ / "a/b" + " --train " + folder_ / "none",
                 "none");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
}

TEST_F(CtrCommandTest, BadInputIsRefusedByName) {
  const std::string bad = folder_ / "bad.tsv";
  ASSERT_EQ(shell("printf '1\\t2\\n' > " + bad).code, 0);
  expect_refused(bin("ctr") + " train --train " + bad,
                 bad + ":1: field 3: expected a field after a tab: the line ends");
  expect_refused(bin("ctr") + " train --data " + folder_ / "misspelt",
                 "misspelt: expected train.tsv there, or --rows N to make up so many examples");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "misspelt"));
  expect_refused(train("--mode sync"), "PADDLE_TRAINING_ROLE");
  expect_refused(train("--mode fast"), "--mode");
  expect_refused(train("--wire-dtype float16"),
                 "--wire-dtype float16: expected float32 or bfloat16");
  expect_refused(train("--precision float16"), "--precision float16: expected float32 or bfloat16");
  expect_refused(bin("ctr") + " train --batch 99999999999", "expected 1 to 1048576");
  expect_refused(train("--mode half-async --max-staleness 2"),
                 "--max-staleness 2: expected with --mode async alone");
  expect_refused(train("--mode local --max-merge 2"),
                 "--max-merge 2: expected with --mode half-async alone");
  expect_refused(through_servers(1, 1, "--geo-steps 2"),
                 "--geo-steps 2: expected with --mode geo alone");
  expect_refused(through_servers(1, 1, "--mode local"),
                 "--mode local: expected no parameter servers beside it, leave out --servers");
  expect_refused("head -c 32 /dev/zero | base64 > " + folder_ / "secret" + " && " +
                     train("--job-secret-file " + folder_ / "secret"),
                 "--job-secret-file: is for parameter servers, expected another --mode than local");
  expect_refused(through_servers(1, 1, "--tls-server-names other"),
                 "--tls-server-names requires --tls-authority");
  expect_refused(bin("cohort") + " run --nproc-per-node 2 -- " + train("--mode local"),
                 "--mode local: expected one process, got 2");
  expect_refused(
      through_servers(1, 1, "--load somewhere"),
      "--load: with servers, the servers load it: cohort run --server-arg=--load=somewhere");
  expect_refused(bin("ctr") + " evaluate --load " + folder_ / "nothing", "nothing");
  expect_refused(bin("ctr") + " generate --rows 0 --output " + folder_ / "x",
                 "--rows: expected 1 or more, got 0");
  expect_refused(bin("ctr") + " generate --test-rows -5 --output " + folder_ / "x",
                 "--test-rows -5: expected 0 or more");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "x"));
  expect_refused(train("--mode async --max-staleness -2"),
                 "--max-staleness -2: expected -1 (any) or more");
  expect_refused(train("--mode local --table-memory-mib 1 --at-cap spill"),
                 "--at-cap spill: expected servers");
  expect_refused(train("--admit-after 2 --admit-probability 0.5"), "--admit-after excludes");
  EXPECT_EQ(shell(bin("ctr") + " evaluate --help | grep -c 'generated'").output, "0\n");
}

TEST_F(CtrCommandTest, TrainersWithOtherFlagsAreRefused) {
  const Ended ended = shell(bin("cohort") + " run --servers 1 --trainers 2 -- sh -c 'exec " +
                            train("--lr 0.00$((PADDLE_TRAINER_ID + 1))") + "'");
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find(
                "--lr: expected the same on all ranks, got 0.001 on rank 0 and 0.002 on rank 1"),
            std::string::npos)
      << ended.output;
}

// Each trainer sees another folder under the same path.
TEST_F(CtrCommandTest, TrainersWithOtherFilesAreRefused) {
  for (const std::string rows : {"1000", "1001"})
    ASSERT_EQ(shell(bin("ctr") + " generate --rows " + rows + " --test-rows 100 --output " +
                    folder_ / rows)
                  .code,
              0);
  const std::string seen = folder_ / "seen";
  std::filesystem::create_directory(seen);
  expect_refused(bin("cohort") +
                     " run --servers 1 --trainers 2 -- unshare -m sh -c 'mount --bind " +
                     folder_ / "100$PADDLE_TRAINER_ID " + seen + " && exec " + bin("ctr") +
                     " train --batch 64 --data " + seen + "'",
                 "--train: expected the same files on all trainers, trainers 0 and 1 have files of "
                 "different sizes");
}

TEST_F(CtrCommandTest, PredictionsGoStraightToWhatIsNoFile) {
  ASSERT_EQ(shell(train("--max-steps 2 --save " + folder_ / "saved")).code, 0);
  const std::string score =
      bin("ctr") + " evaluate --load " + folder_ / "saved" + " --data " + folder_ / "data";
  EXPECT_EQ(shell(bin("cohort") + " run --servers 1 --trainers 1 -- " + score).code, 0)
      << "no training: servers beside it do no harm";
  const std::string input = folder_ / "data/test.tsv";
  const std::string predict =
      bin("ctr") + " predict --load " + folder_ / "saved" + " --input " + input + " --output ";
  ASSERT_EQ(shell(predict + folder_ / "file").code, 0);
  const std::string expected = cohort::read_file(folder_ / "file");
  EXPECT_TRUE(shell(predict + "/dev/stdout 2> /dev/null").output == expected);
  EXPECT_TRUE(shell(predict + "- 2> /dev/null").output == expected);
  ASSERT_EQ(shell("echo before > " + folder_ / "all").code, 0);
  ASSERT_EQ(shell(predict + "/dev/stdout >> " + folder_ / "all").code, 0);
  EXPECT_TRUE(cohort::read_file(folder_ / "all") == "before\n" + expected);
  EXPECT_TRUE(shell("mkfifo " + folder_ / "pipe; cat " + folder_ / "pipe & " + predict +
                    folder_ / "pipe > /dev/null; wait")
                  .output == expected);
  EXPECT_TRUE(std::filesystem::is_symlink("/dev/stdout"));
  EXPECT_TRUE(std::filesystem::is_fifo(folder_ / "pipe"));
  expect_refused(predict + folder_ / "data/../data/test.tsv",
                 "expected another file than --input's");
  expect_refused(bin("ctr") + " predict --load " + folder_ / "saved" + " --input " +
                     folder_ / "data" + " --output " + folder_ / "x",
                 folder_ / "data" + ": expected a file that can be read, got a folder");
}

TEST_F(CtrCommandTest, GeneratedDataIsReplacedOnRequestAlone) {
  const std::string generate = bin("ctr") + " generate --rows 100 --output " + folder_ / "data";
  ASSERT_EQ(shell(generate).code, 0);
  expect_refused(generate, folder_ / "data/train.tsv" + ": is there already");
  const Ended none = shell(generate + " --overwrite --test-rows 0");
  EXPECT_EQ(none.code, 0) << none.output;
  EXPECT_NE(none.output.find("no test examples"), std::string::npos) << none.output;
  const Ended one = shell(generate + " --overwrite --test-rows 1");
  EXPECT_EQ(one.code, 0) << one.output;
  EXPECT_NE(one.output.find("AUC undefined"), std::string::npos) << one.output;
  EXPECT_EQ((none.output + one.output).find("nan"), std::string::npos);
}

TEST_F(CtrCommandTest, ASignalEndsGenerateWithoutAPartOfAFile) {
  const Ended ended = shell(
      bin("ctr") + " generate --rows 100000000 --output " + folder_ / "data" +
      " & for i in $(seq 1200); do ls " + folder_ / "data" +
      "/*.tmp-* > /dev/null 2>&1 && break; sleep 0.05; done; kill -TERM $!; wait $!; echo $?; ls " +
      folder_ / "data");
  EXPECT_TRUE(ended.output.ends_with("143\n")) << ended.output;
}

// A killed one cannot tidy up. What it left is known by its truth.json; a test.tsv alone is somebody's.
TEST_F(CtrCommandTest, TrainingReplacesWhatAKilledGenerationLeftAndNothingElse) {
  const std::string data = folder_ / "data";
  const std::string generate = bin("ctr") + " generate --output ";
  const Ended ended = shell(
      generate + data + " --rows 100000000 --test-rows 50 --seed 7 & for i in $(seq 1200); do ls " +
      data + "/train.tsv.tmp-* > /dev/null 2>&1 && break; sleep 0.05; done; kill -KILL $!; " +
      "wait $!; rm " + data + "/train.tsv.tmp-*; ls " + data);
  EXPECT_TRUE(ended.output.ends_with("test.tsv\ntruth.json\n")) << ended.output;
  EXPECT_FALSE(std::filesystem::exists(data + "/train.tsv"));
  expect_refused(generate + data + " --rows 2000", data + "/test.tsv: is there already");
  const std::string train = bin("ctr") + " train --rows 2000 --batch 64 --max-steps 2 --data ";
  const Ended trained = shell(train + data);
  EXPECT_EQ(trained.code, 0) << trained.output;
  EXPECT_NE(trained.output.find("making up 2000 examples"), std::string::npos) << trained.output;
  ASSERT_EQ(shell(generate + folder_ / "fresh" + " --rows 2000").code, 0);
  for (const std::string name : {"/train.tsv", "/test.tsv", "/truth.json"})
    EXPECT_TRUE(cohort::read_file(data + name) == cohort::read_file(folder_ / "fresh" + name))
        << name;
  const std::string mine = folder_ / "mine";
  std::filesystem::create_directory(mine);
  cohort::write_file(mine + "/test.tsv", "mine");
  expect_refused(train + mine, mine + "/test.tsv: is there already");
  EXPECT_EQ(cohort::read_file(mine + "/test.tsv"), "mine");
}

// What was learnt outlives a bad line of the test files, which is seen early where it comes early.
TEST_F(CtrCommandTest, ABadTestLineCostsNoEpoch) {
  const std::string good = generated(3000);
  const std::string early = edited("early", "2s/^./x/");
  const std::string late = edited("late", "2990s/^./x/");
  const std::string train = bin("ctr") + " train --train " + good + " --test ";
  const std::string save = " --save " + folder_ / "saved";
  expect_refused(train + good + " " + early + save, early + ":2: field 1: expected a label");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "saved"));
  expect_refused(train + late + save, late + ":2990: field 1: expected a label");
  const Ended skipped = shell(bin("ctr") + " evaluate --skip-damaged --load " + folder_ / "saved" +
                              " --test " + late);
  EXPECT_EQ(skipped.code, 0) << skipped.output;
  EXPECT_NE(skipped.output.find("left out 1 malformed line of the test\n"), std::string::npos)
      << skipped.output;
}

TEST_F(CtrCommandTest, ProgressSaysWhoseExamplesItCounts) {
  const Ended ended = shell(train("--max-steps 2 --print-freq 1"));
  EXPECT_NE(ended.output.find("examples/s of this trainer"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("examples/s of all trainers"), std::string::npos) << ended.output;
}

// Rows of more than ten times the cap: those on disk are as good as those in memory, to the bit.
TEST_F(CtrCommandTest, ASpillingTableLearnsWhatOneWithoutACapLearns) {
  const auto job = [&](const std::string& name, const std::string& flags) {
    const Ended ended =
        shell("timeout 250 " + bin("cohort") + " run --servers 1 --trainers 2 -- sh -c '" +
              train("--max-steps 40 --save " + folder_ / name + flags) + " && " + bin("cohort-ps") +
              " status --json --pservers $PADDLE_PSERVERS_IP_PORT_LIST'");
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  const auto test_line = [](const std::string& output) {
    const size_t begin = std::min(output.size(), output.rfind("test: AUC"));
    return output.substr(begin, output.find('\n', begin) - begin);
  };
  const std::string plain = job("plain", "");
  const std::string spilled = job("spilled", " --table-memory-mib 1 --at-cap spill");
  EXPECT_EQ(number_after(plain, "\"cold_rows\":"), 0) << plain;
  EXPECT_GT(number_after(spilled, "\"rows\":"), 0) << spilled;
  EXPECT_GT(number_after(spilled, "\"cold_rows\":"), 4 * number_after(spilled, "\"rows\":"))
      << spilled;
  EXPECT_FALSE(test_line(plain).empty()) << plain;
  EXPECT_EQ(test_line(spilled), test_line(plain));
  // A reader of the checkpoint leaves its parent folder alone.
  const std::string aside = folder_ / "aside";
  ASSERT_EQ(shell("mkdir -p " + aside + "/loading").code, 0);
  const std::string here = "cd " + aside + " && ";
  for (const std::string name : {"plain", "spilled"}) {
    const Ended evaluated = shell(here + bin("ctr") + " evaluate --data " + folder_ / "data" +
                                  " --load " + folder_ / name);
    EXPECT_EQ(evaluated.code, 0) << evaluated.output;
    EXPECT_EQ(test_line(evaluated.output), test_line(plain)) << evaluated.output;
    const Ended predicted =
        shell(here + bin("ctr") + " predict --load " + folder_ / name + " --input " +
              folder_ / "data/test.tsv" + " --output " + folder_ / name + ".txt");
    EXPECT_EQ(predicted.code, 0) << predicted.output;
    const Ended exported = shell(here + bin("cohort-ps") + " export " + folder_ / name +
                                 " --output " + folder_ / name + ".export");
    EXPECT_EQ(exported.code, 0) << exported.output;
  }
  EXPECT_EQ(shell("ls " + aside).output, "loading\n");
  const auto equals_plain = [&](const std::string& file) {
    const std::string content = cohort::read_file(folder_ / "spilled" + file);
    return !content.empty() && content == cohort::read_file(folder_ / "plain" + file);
  };
  for (const char* file : {".txt", ".export/dense.safetensors", ".export/categories.safetensors"}) {
    EXPECT_TRUE(equals_plain(file)) << file;
  }
}

}  // namespace ctr_command_test
