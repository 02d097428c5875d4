// SPDX-License-Identifier: Apache-2.0
// The imagenet program as a user runs it, on pictures that the test draws.
#include <cmath>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "cohort/train/hold_folder.h"

#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"
#include "tests/support/free_port.h"
#include "tests/support/other_flags.h"
#include "tests/support/shell.h"

namespace imagenet_command_test {

using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

class ImagenetCommandTest : public testing::Test {
 protected:
  // 36 pictures to train on, 15 to evaluate on: uneven on 2 ranks, even on 3.
  void SetUp() override { cohort::test::draw_image_folders(folder_ / "data", 12, 5, 40, 48); }

  std::string flags(const std::string& output, const std::string& more) const {
    return folder_ / "data" + " --output " + folder_ / output +
           " --image-size 32 --batch-size 12 --workers 2 --lr 0.005 --seed 5 " + more;
  }
  Ended on_ranks(int count, const std::string& output, const std::string& more) const {
    const std::string program = bin("imagenet") + " " + flags(output, more);
    if (count == 1) return shell(program);
    return shell(bin("cohort") + " run --nproc-per-node " + std::to_string(count) + " -- " +
                 program);
  }
  void expect_trained(int count, const std::string& output, const std::string& more) const {
    const Ended ended = on_ranks(count, output, more);
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  void expect_refused(int code, const Ended& ended, const std::string& text) const {
    EXPECT_EQ(ended.code, code) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }

  std::vector<nlohmann::json> history(const std::string& output) const {
    std::istringstream file(cohort::read_file(folder_ / output + "/history.jsonl"));
    std::vector<nlohmann::json> rows;
    for (std::string line; std::getline(file, line);) rows.push_back(nlohmann::json::parse(line));
    if (rows.empty()) throw std::runtime_error(output + ": no history");
    return rows;
  }
  nlohmann::json manifest(const std::string& checkpoint) const {
    return nlohmann::json::parse(cohort::read_file(folder_ / checkpoint + "/manifest.json"));
  }

  const TemporaryFolder folder_;
};

TEST_F(ImagenetCommandTest, LearnsShapes) {
  expect_trained(1, "run", "--epochs 6 --print-freq 1");
  const auto rows = history("run");
  ASSERT_EQ(rows.size(), 6U);
  // Guessing gives log 3 = 1.1 and a third; 18 steps from fresh parameters get clear of both.
  EXPECT_LT(rows.back()["train_loss"].get<double>(), 0.75);
  EXPECT_GT(rows.back()["train_top1"].get<double>(), 70);
  EXPECT_EQ(rows.back()["valid_top5"].get<double>(), 100) << "three classes are always among five";
}

// Images in another order of memory change nothing but the order of sums, which nine steps make some
// thousand times larger than 1e-16. bfloat16 has 8 bits: nine steps move a loss of 0.3 by some
// hundredths.
TEST_F(ImagenetCommandTest, LearnsInBfloat16AndWithChannelsLast) {
  const auto loss_of = [this](const std::string& run, const std::string& more) {
    expect_trained(2, run, "--epochs 3 " + more);
    return history(run).back()["train_loss"].get<double>();
  };
  const double loss = loss_of("plain", "--precision float64");
  EXPECT_NEAR(loss_of("last", "--precision float64 --channels-last"), loss, 1e-9);
  for (const std::string strategy : {"ddp", "zero3"}) {
    const double low =
        loss_of("low-" + strategy, "--precision bfloat16 --channels-last --strategy " + strategy);
    EXPECT_NEAR(low, loss, 0.15) << strategy;
    EXPECT_GT(std::abs(low - loss), 1e-6) << "in bfloat16";
  }
}

TEST_F(ImagenetCommandTest, FlagsThatCannotHoldAreRefused) {
  for (const auto& [more, text] :
       {std::pair{"--cpu-offload --strategy zero3",
                  "--cpu-offload: this run computes on the CPU, where there is nothing to "
                  "offload: leave it out, or choose a --device"},
        {"--cpu-offload", "--cpu-offload: this run computes on the CPU"},
        {"--device tpu", "device \"tpu\": expected cpu, cuda or cuda:N"},
        {"--start-epoch 95 --epochs 90",
         "--start-epoch 95: expected less than --epochs 90, or no epoch is trained"},
        {"--start-epoch 3 --epochs 3", "--start-epoch 3: expected less than --epochs 3"},
        {"--init-scale 8", "--init-scale: expected --precision float16, got float32"},
        {"--lr 1e30", "--lr 1e30: expected a number from 0 to 100"}}) {
    expect_refused(2, shell(bin("imagenet") + " " + flags("run", more)), text);
  }
  cohort::test::expect_other_flags_refused(bin("imagenet") + " " + flags("run", ""), "--momentum",
                                           "0.9", "0.5");
}

TEST_F(ImagenetCommandTest, RanksThatEvaluateOtherWeightsAreRefused) {
  expect_trained(1, "0", "--epochs 1");
  expect_trained(1, "1", "--epochs 2");
  std::filesystem::create_directory(folder_ / "seen");
  const auto evaluate = [&](const std::string& resume) {
    return shell(bin("cohort") + " run --nproc-per-node 2 -- unshare -m sh -c 'mount --bind " +
                 folder_ / "$RANK " + folder_ / "seen" + " && exec " + bin("imagenet") + " " +
                 flags("run", "--evaluate --resume " + resume + "'"));
  };
  expect_refused(2, evaluate(folder_ / "seen/checkpoint"),
                 "--resume: expected the same weights on all ranks, ranks 0 and 1 differ");
  expect_refused(2, evaluate(folder_ / "$RANK/checkpoint"),
                 "--resume: expected the same on all ranks of a host, got " +
                     folder_ / "0/checkpoint on rank 0 and ");
  EXPECT_EQ(evaluate(folder_ / "1/checkpoint").code, 0);
  // A rank that resumes beside one that begins.
  expect_refused(
      2,
      shell(bin("cohort") + " run --nproc-per-node 2 -- sh -c 'exec " + bin("imagenet") + " " +
            flags("run", "$([ $RANK = 0 ] || echo --resume " + folder_ / "1" + "/checkpoint)'")),
      "--resume: expected the same on all ranks, got no value on rank 0 and ");
}

TEST_F(ImagenetCommandTest, ResumedRunIsBitEqualToOneNeverStopped) {
  for (const int count : {1, 2}) {
    const std::string name = "ranks" + std::to_string(count);
    expect_trained(count, name + "-whole", "--epochs 3");
    expect_trained(count, name + "-parts", "--epochs 1");
    expect_trained(count, name + "-parts",
                   "--epochs 3 --resume " + folder_ / name + "-parts/checkpoint");
    const auto whole = manifest(name + "-whole/checkpoint");
    const auto parts = manifest(name + "-parts/checkpoint");
    EXPECT_EQ(whole.at("files"), parts.at("files")) << name << ": weights and optimizer";
    auto facts = whole["facts"], facts_of_parts = parts["facts"];
    for (auto* both : {&facts, &facts_of_parts}) both->erase("job");
    EXPECT_EQ(facts, facts_of_parts) << name << ": momentum and best result";
    EXPECT_EQ(history(name + "-whole").size(), history(name + "-parts").size());
    const auto early = manifest(name + "-parts/model_best");
    EXPECT_NE(early["facts"]["epochs_done"], "0");
  }
}

// An older run's checkpoint in the folder is none of the job's.
TEST_F(ImagenetCommandTest, RanksThatAreStartedAgainGoOnAtTheirJobsLastEpoch) {
  expect_trained(2, "whole", "--epochs 3");
  expect_trained(2, "run", "--epochs 1");
  std::filesystem::remove(folder_ / "run/history.jsonl");
  // Rank 1 fails once before the job has a checkpoint, and once after.
  const std::string script =
      "if [ $RANK = 1 ] && [ $COHORT_RESTART_COUNT = 0 ]; then exit 7; fi; "
      "if [ $RANK = 1 ] && [ $COHORT_RESTART_COUNT = 1 ]; then (until [ -e " +
      folder_ / "run/history.jsonl" + " ]; do sleep 0.01; done; kill -9 $$) & fi; exec " +
      bin("imagenet") + " " + flags("run", "--epochs 3 --overwrite");
  const Ended ended =
      shell(bin("cohort") + " run --nproc-per-node 2 --max-restarts 2 --grace 1 -- sh -c '" +
            script + "'");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("restart 2 of 2"), std::string::npos) << ended.output;
  const auto rows = history("run"), whole = history("whole");
  ASSERT_EQ(rows.size(), 3U) << "no epoch was trained twice, none is another run's";
  for (size_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(rows[epoch]["epoch"], epoch);
    EXPECT_EQ(rows[epoch]["train_loss"], whole[epoch]["train_loss"]);
  }
  EXPECT_EQ(manifest("run/checkpoint").at("files"), manifest("whole/checkpoint").at("files"));
}

TEST_F(ImagenetCommandTest, GoesOnWithAnotherStrategy) {
  const std::string flags = "--precision float64 --sync-bn ";
  expect_trained(2, "whole", flags + "--epochs 3");
  expect_trained(2, "parts", flags + "--epochs 1 --strategy zero3");
  const std::string resume = " --resume " + folder_ / "parts/checkpoint";
  expect_trained(1, "parts", flags + "--epochs 2" + resume);
  expect_trained(2, "parts", flags + "--epochs 3 --strategy zero1" + resume);
  const Ended evaluated = on_ranks(2, "parts", "--evaluate --precision float64" + resume);
  EXPECT_EQ(evaluated.code, 0) << evaluated.output;
  const auto expected = history("whole"), found = history("parts");
  ASSERT_EQ(found.size(), expected.size());
  for (size_t epoch = 0; epoch < found.size(); ++epoch)
    EXPECT_NEAR(found[epoch]["valid_loss"].get<double>(),
                expected[epoch]["valid_loss"].get<double>(), 1e-6)
        << epoch;
}

TEST_F(ImagenetCommandTest, RanksWithSyncBatchNormFollowOneProcess) {
  const std::string flags = "--epochs 2 --precision float64 --sync-bn";
  expect_trained(1, "one", "--epochs 2 --precision float64");
  for (const int count : {2, 3}) {
    const std::string name = "ranks" + std::to_string(count);
    expect_trained(count, name, flags);
    const auto expected = history("one");
    const auto found = history(name);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t epoch = 0; epoch < found.size(); ++epoch) {
      for (const char* key : {"train_loss", "valid_loss"}) {
        // float64: each of 20 layers sums some 1e4 terms in another order, 1e4 eps = 2e-12; six
        // steps of a network whose normalised layers amplify a difference some tenfold each.
        EXPECT_NEAR(found[epoch][key].get<double>(), expected[epoch][key].get<double>(), 1e-6)
            << name << ", epoch " << epoch << ", " << key;
      }
    }
    EXPECT_EQ(found.back()["valid_top1"], expected.back()["valid_top1"]) << name;
  }
  // Whatever the ranks hold of the model.
  for (const std::string strategy : {"zero1", "zero3"}) {
    expect_trained(2, strategy, flags + " --strategy " + strategy);
    EXPECT_NEAR(history(strategy).back()["valid_loss"].get<double>(),
                history("one").back()["valid_loss"].get<double>(), 1e-6)
        << strategy;
  }
  // Without it each rank normalises over its own pictures, and the losses part at once.
  expect_trained(2, "local", "--epochs 1 --precision float64");
  EXPECT_GT(std::abs(history("local")[0]["train_loss"].get<double>() -
                     history("one")[0]["train_loss"].get<double>()),
            1e-3);
}

TEST_F(ImagenetCommandTest, SpawnsItsOwnRanks) {
  const Ended ended = on_ranks(
      1, "run", "--epochs 1 --multiprocessing-distributed --nproc-per-node 2 --print-freq 1");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("batch 12 on 2 ranks over shm;"), std::string::npos) << ended.output;
  EXPECT_EQ(history("run").size(), 1U);
  expect_refused(2, on_ranks(1, "run", "--multiprocessing-distributed"),
                 "expected --nproc-per-node");
  const std::string spawning = "--multiprocessing-distributed --nproc-per-node 2 ";
  for (const std::string place : {"--port 29500", "--addr 10.0.0.1", "--dist-url tcp://a:29500"}) {
    expect_refused(2, on_ranks(1, "run", spawning + place),
                   "expected --rank and --world-size, which count nodes");
  }
  expect_refused(
      2, on_ranks(1, "run", spawning + "--rank 0 --world-size 1 --dist-url file:///tmp/x"),
      "--dist-url file:///tmp/x: expected tcp://host:port with --multiprocessing-distributed");
}

TEST_F(ImagenetCommandTest, ATrainingThatDivergedIsNamedAndNotSaved) {
  std::string diverging = bin("imagenet") + " " + flags("run", "--overwrite --epochs 4");
  const std::string rate = "--lr 0.005";
  diverging.replace(diverging.find(rate), rate.size(), "--lr 100");
  // Named where a step is printed, or else where the epoch ends.
  for (const std::string& run :
       {diverging, bin("cohort") + " run --nproc-per-node 2 -- " + diverging + " --print-freq 1"}) {
    expect_refused(1, shell(run), "expected a number; the training has diverged");
    if (!std::filesystem::exists(folder_ / "run/checkpoint/manifest.json")) continue;
    const auto rows = history("run");
    EXPECT_EQ(manifest("run/checkpoint")["facts"]["epochs_done"], std::to_string(rows.size()));
    for (const auto& row : rows) EXPECT_TRUE(row["valid_loss"].is_number());
  }
}

TEST_F(ImagenetCommandTest, DoesNotSpawnUnderALauncher) {
  const std::string spawning = "--epochs 1 --multiprocessing-distributed --nproc-per-node 2";
  const std::string refusal = "--multiprocessing-distributed: a launcher started this process (";
  expect_refused(2, on_ranks(2, "run", spawning), refusal + "RANK=");
  for (const std::string variable : {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PADDLE_TRAINER_ID"}) {
    const std::string program = variable + "=1 " + bin("imagenet") + " ";
    expect_refused(2, shell(program + flags("run", spawning)), refusal + variable + "=1)");
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << "a refused job leaves no folder";
  // Explicit numbers go before a launcher's: one of its processes may stand for a node.
  const std::string node = " --multiprocessing-distributed --rank 0 --world-size 1";
  expect_refused(2, shell("SLURM_PROCID=0 " + bin("imagenet") + " " + flags("run", node)),
                 "expected --nproc-per-node");
}

// A script that starts each local rank itself, with LOCAL_RANK, beside the flag: one job of two
// ranks, not two of two.
TEST_F(ImagenetCommandTest, AProcessWithALocalRankIsThatRankAndSpawnsNone) {
  const std::string port = std::to_string(cohort::test::free_port());
  const std::string program =
      bin("imagenet") + " " +
      flags("run",
            "--epochs 1 --print-freq 1 --multiprocessing-distributed --rank 0 --world-size 1 "
            "--nproc-per-node 2 --addr 127.0.0.1 --rendezvous-timeout 60 --port " +
                port);
  const Ended ended = shell("LOCAL_RANK=1 " + program + " & LOCAL_RANK=0 " + program +
                            "; first=$?; wait $! && exit $first");
  EXPECT_EQ(ended.code, 0) << ended.output;
  const std::string start = "batch 12 on 2 ranks";
  const size_t first = ended.output.find(start);
  EXPECT_NE(first, std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find(start, first + 1), std::string::npos)
      << "a second job: " << ended.output;
  EXPECT_EQ(history("run").size(), 1U);
  expect_refused(2,
                 shell("LOCAL_RANK=0 " + bin("imagenet") + " " +
                       flags("run", "--multiprocessing-distributed --nproc-per-node 2")),
                 "--nproc-per-node is set but --rank is not");
  expect_refused(2,
                 shell("LOCAL_RANK=0 " + bin("imagenet") + " " +
                       flags("run", "--multiprocessing-distributed --rank 0 --world-size 2")),
                 "--multiprocessing-distributed: expected --nproc-per-node");
}

// A launcher that put several processes on this node: none of them stands for the node.
TEST_F(ImagenetCommandTest, OneOfSeveralProcessesOfALauncherDoesNotStandForTheNode) {
  const std::string node =
      "--epochs 1 --multiprocessing-distributed --nproc-per-node 2 --rank 0 --world-size 1";
  const std::string refusal = "--multiprocessing-distributed: a launcher started this process (";
  expect_refused(2, on_ranks(2, "run", node), refusal + "RANK=");
  expect_refused(2,
                 shell("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 " + bin("imagenet") +
                       " " + flags("run", node)),
                 refusal + "OMPI_COMM_WORLD_RANK=0)");
  expect_refused(2,
                 shell("SLURM_PROCID=0 SLURM_STEP_TASKS_PER_NODE='2(x2)' " + bin("imagenet") + " " +
                       flags("run", node)),
                 refusal + "SLURM_PROCID=0)");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << "a refused job leaves no folder";
}

TEST_F(ImagenetCommandTest, ABatchLargerThanTheSetIsRefused) {
  std::string large = flags("large", "");
  const std::string size = "--batch-size 12";
  large.replace(large.find(size), size.size(), "--batch-size 37");
  expect_refused(2, shell(bin("imagenet") + " " + large),
                 "--batch-size: expected at most the pictures in ");
}

TEST_F(ImagenetCommandTest, ServersThatTheStrategyDoesNotUseAreRefused) {
  expect_refused(2,
                 shell("PADDLE_TRAINING_ROLE=TRAINER PADDLE_TRAINERS_NUM=1 PADDLE_TRAINER_ID=0 "
                       "PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:1,127.0.0.1:2 " +
                       bin("imagenet") + " " + flags("unused", "")),
                 "--strategy ddp uses no parameter servers, and 2 are there");
}

TEST_F(ImagenetCommandTest, EvaluationIsTheSameOnEveryNumberOfRanks) {
  expect_trained(1, "run", "--epochs 2");
  const double loss = history("run").back()["valid_loss"].get<double>();
  std::string evaluation = flags("run", "--evaluate --resume " + folder_ / "run/checkpoint");
  const std::string size = "--batch-size 12";
  evaluation.replace(evaluation.find(size), size.size(), "--batch-size 16");  // No multiple of 3.
  for (const int count : {1, 2, 3}) {
    const Ended ended = shell(bin("cohort") + " run --nproc-per-node " + std::to_string(count) +
                              " -- " + bin("imagenet") + " " + evaluation);
    ASSERT_EQ(ended.code, 0) << ended.output;
    const auto place = ended.output.find("evaluated 15 pictures: loss ");
    ASSERT_NE(place, std::string::npos) << ended.output;
    std::istringstream line(ended.output.substr(place));
    std::string word;
    double found = 0, top1 = 0;
    line >> word >> word >> word >> word >> found >> word >> top1;
    // float32 kernels may sum in another order for another batch size: 20 layers of some eps.
    EXPECT_NEAR(found, loss, 1e-4) << count << " ranks";
    EXPECT_NEAR(top1, history("run").back()["valid_top1"].get<double>(), 0.001) << count;
  }
}

TEST_F(ImagenetCommandTest, MistakesAreNamed) {
  expect_refused(2, shell(bin("imagenet") + " " + folder_ / "absent"), "absent/val");
  expect_refused(2, on_ranks(1, "run", "--arch vgg"), "--arch vgg: expected one of resnet18");
  expect_refused(2, on_ranks(1, "run", "--strategy tensor"),
                 "--strategy tensor: expected ddp, zero1");
  expect_refused(2, on_ranks(1, "run", "--lr-rule cubic"), "expected none, linear or sqrt");
  expect_refused(2, on_ranks(1, "run", "--batch-size-per-rank 4"), "--batch-size");
  expect_refused(2, on_ranks(1, "run", "--epochs -3"), "--epochs -3: expected a number above 0");
  expect_refused(2, shell(bin("imagenet") + " " + folder_ / "data" + " --lr nan"),
                 "--lr nan: expected a number from 0 to 100");
  expect_refused(2, on_ranks(1, "run", "--rank 0 --world-size 2"),
                 "--rank is set but --addr (or --dist-url, or MASTER_ADDR) is not");
  expect_refused(2, on_ranks(1, "run", "--rank 0 --world-size 2 --addr 127.0.0.1"),
                 "--rank is set but --port (or --dist-url, or MASTER_PORT) is not");
  expect_refused(2, on_ranks(1, "run", "--resume " + folder_ / "nothing"), "no checkpoint here");
  expect_refused(2, on_ranks(1, "run", "--evaluate"), "--evaluate: expected --resume FOLDER");
  expect_refused(2, shell(bin("imagenet") + " " + folder_ / "data --output /proc"),
                 "--output /proc: expected a folder that can be written to");
  const Ended ended = shell(bin("cohort") + " run --nproc-per-node 2 -- " + bin("imagenet") + " " +
                            folder_ / "data" + " --batch-size 13");
  expect_refused(2, ended, "batch of 13 examples on 2 ranks: expected a multiple of 2");
}

TEST_F(ImagenetCommandTest, ATrainingIsReplacedOnRequestAlone) {
  expect_trained(1, "run", "--epochs 1");
  const auto before = manifest("run/checkpoint");
  expect_refused(2, on_ranks(1, "run", "--epochs 1"),
                 "run holds a training: pass --resume " + folder_ / "run/checkpoint");
  EXPECT_EQ(manifest("run/checkpoint"), before);
  expect_trained(1, "run", "--epochs 1 --overwrite --momentum 0.5");
  EXPECT_NE(manifest("run/checkpoint").at("files"), before.at("files"));
  EXPECT_EQ(history("run").size(), 1U);
}

TEST_F(ImagenetCommandTest, TwoTrainingsDoNotShareAFolder) {
  const cohort::Fd other = cohort::train::hold_folder("--output", folder_ / "run");
  expect_refused(2, on_ranks(1, "run", "--epochs 1"),
                 "--output " + folder_ / "run" + ": another training is running in this folder");
}

TEST_F(ImagenetCommandTest, RanksThatSeeOtherPicturesAreRefused) {
  namespace fs = std::filesystem;
  const fs::path data = folder_ / "data", other = folder_ / "other";
  fs::copy(data, other, fs::copy_options::recursive);
  const fs::path folder = fs::directory_iterator(other / "train")->path();
  fs::rename(fs::directory_iterator(folder)->path(), folder / "another.png");
  const std::string program =
      bin("imagenet") + " $DATA" + flags("run", "--epochs 1").substr(data.string().size());
  const Ended ended = shell(
      bin("cohort") + " run --nproc-per-node 2 -- sh -c '[ $RANK = 0 ] && DATA=" + data.string() +
      " || DATA=" + other.string() + "; exec " + program + "'");
  expect_refused(2, ended, "/train: expected the same pictures on all ranks, ranks 0 and 1 differ");
}

TEST_F(ImagenetCommandTest, DamagedPictureIsNamedOrSkipped) {
  const std::string path = folder_ / "data/train/square/4.jpg";
  cohort::write_file(path, cohort::read_file(path).substr(0, 100));
  expect_refused(2, on_ranks(1, "run", "--epochs 1"), path);
  const Ended skipping = on_ranks(1, "run", "--epochs 1 --skip-damaged");
  EXPECT_EQ(skipping.code, 0) << skipping.output;
  EXPECT_NE(skipping.output.find("epoch 0: 1 damaged picture left out"), std::string::npos)
      << skipping.output;
  EXPECT_EQ(skipping.output.find("evaluation: "), std::string::npos) << skipping.output;
  cohort::write_file(folder_ / "data/val/square/1.jpg", "damaged");
  const Ended evaluated = on_ranks(1, "run", "--epochs 1 --skip-damaged --overwrite");
  EXPECT_EQ(evaluated.code, 0) << evaluated.output;
  EXPECT_NE(evaluated.output.find("evaluation: 1 damaged picture left out"), std::string::npos)
      << evaluated.output;
}

// Killed or out of space before the checkpoint, a run repeats the epoch, and all that is saved at
// its end.
TEST_F(ImagenetCommandTest, TheCheckpointIsTheLastThatAnEpochSaves) {
  std::filesystem::create_directories(folder_ / "run");
  cohort::write_file(folder_ / "run/model_best", "a file where a folder is to be");
  EXPECT_NE(on_ranks(1, "run", "--epochs 1").code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/checkpoint"));
  std::filesystem::remove(folder_ / "run/model_best");
  expect_trained(1, "run", "--epochs 2");
  EXPECT_EQ(history("run").size(), 2U) << "each epoch once";
  // From an earlier checkpoint: what came after it is trained again.
  std::filesystem::copy(folder_ / "run/checkpoint", folder_ / "early",
                        std::filesystem::copy_options::recursive);
  expect_trained(1, "run", "--epochs 3 --resume " + folder_ / "run/checkpoint");
  expect_trained(1, "run", "--epochs 3 --resume " + folder_ / "early");
  const auto rows = history("run");
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows.back()["epoch"], 2);
}

TEST_F(ImagenetCommandTest, BatchSizePerRankIsTheGlobalOneDivided) {
  const std::string data = folder_ / "data" + " --image-size 32 --seed 5 --epochs 1 --output ";
  const std::string run = bin("cohort") + " run --nproc-per-node 2 -- " + bin("imagenet") + " ";
  const Ended ended =
      shell(run + data + folder_ / "a" + " --batch-size-per-rank 6 --lr-rule linear");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(
      ended.output.find("batch 12 on 2 ranks over shm; learning rate 0.1 x 12 / 256 = 0.0046875 "
                        "(linear); float32, contiguous"),
      std::string::npos)
      << ended.output;
}

}  // namespace imagenet_command_test
