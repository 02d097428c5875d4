// SPDX-License-Identifier: Apache-2.0
// The imagenet program through parameter servers, as a user runs it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "cohort/base/safetensors.h"

#include "examples/imagenet/optimizer_options.h"
#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"
#include "tests/support/shell.h"

namespace imagenet_servers_test {

using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;
using Weights = std::map<std::string, std::vector<float>>;

class ImagenetServersTest : public testing::Test {
 protected:
  // 24 pictures: 2 steps of 12 an epoch.
  void SetUp() override { cohort::test::draw_image_folders(folder_ / "data", 8, 2, 40, 48); }

  Ended run(const std::string& launch, const std::string& output, const std::string& more) const {
    return shell(bin("cohort") + " run " + launch + " -- " + bin("imagenet") + " " +
                 folder_ / "data" + " --output " + folder_ / output +
                 " --image-size 32 --batch-size " + std::to_string(batch_size_) +
                 " --workers 1 --lr 0.01 --seed 5 " + more);
  }
  void expect_trained(const std::string& launch, const std::string& output,
                      const std::string& more) const {
    const Ended ended = run(launch, output, more);
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  void expect_refused(const std::string& more, const std::string& text) const {
    const Ended ended = run("--servers 1 --trainers 2", "refused", more);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }

  Weights weights(const std::string& output) const {
    Weights all;
    for (const auto& entry :
         std::filesystem::directory_iterator(folder_ / output + "/checkpoint")) {
      if (!entry.path().filename().string().starts_with("weights")) continue;
      const cohort::SafetensorsFile file(entry.path().string());
      for (const auto& tensor : file.tensors()) {
        if (tensor.dtype != cohort::DType::kF32) continue;
        auto& values = all[tensor.name];
        values.resize(tensor.bytes.size() / sizeof(float));
        std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
      }
    }
    if (all.empty()) throw std::runtime_error(output + ": no weights");
    return all;
  }
  nlohmann::json manifest(const std::string& output) const {
    return nlohmann::json::parse(cohort::read_file(folder_ / output + "/checkpoint/manifest.json"));
  }
  std::vector<double> train_losses(const std::string& output) const {
    std::istringstream file(cohort::read_file(folder_ / output + "/history.jsonl"));
    std::vector<double> losses;
    for (std::string line; std::getline(file, line);)
      losses.push_back(nlohmann::json::parse(line)["train_loss"]);
    if (losses.empty()) throw std::runtime_error(output + ": no history");
    return losses;
  }

  const TemporaryFolder folder_;
  int batch_size_ = 12;
};

// The largest difference of two runs' weights, of those that are about 1 or less; NaN if one is.
double difference(const Weights& a, const Weights& b) {
  double largest = 0;
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, values] : a) {
    const auto& others = b.at(name);
    for (size_t i = 0; i < values.size(); ++i) {
      const double size = std::max(1.0, std::abs(static_cast<double>(values[i])));
      const double found = std::abs(static_cast<double>(values[i]) - others.at(i)) / size;
      if (std::isnan(found)) return found;
      largest = std::max(largest, found);
    }
  }
  return largest;
}

// Each rank's gradient of the first step is the same in all three runs. A step rounds a parameter
// and its momentum some four times, to 2^-24 of at most 1: 2.4e-7. The next step's gradient differs
// by what normalised layers make of that, some tenfold: 2.4e-7 + 2.4e-6 after two steps.
constexpr double kStepRounding = 2.4e-7;
constexpr double kRounding = 2.7e-6;

TEST_F(ImagenetServersTest, SyncIsDdpAndRanksOfAHostMayBeOneTrainer) {
  expect_trained("--nproc-per-node 2", "ddp", "--epochs 1");
  expect_trained("--servers 2 --trainers 2", "sync", "--epochs 1 --strategy ps-sync");
  expect_trained("--servers 1 --trainers 2", "host",
                 "--epochs 1 --strategy ps-sync --ps-host-ranks 2");
  EXPECT_LE(difference(weights("ddp"), weights("sync")), kRounding);
  EXPECT_LE(difference(weights("ddp"), weights("host")), kRounding);
  // What a bound of this size sees: weight decay, by far the smallest part of an update.
  expect_trained("--servers 1 --trainers 2", "other",
                 "--epochs 1 --strategy ps-sync --weight-decay 1e-3");
  EXPECT_GT(difference(weights("ddp"), weights("other")), 5 * kRounding);
}

// One step: in the second, rounding may take an activation over the edge of a ReLU or of a maximum,
// and with this seed does. Gradients then differ by its share, as those in float32 and float64 do.
TEST_F(ImagenetServersTest, AStepOnChannelsLastImagesIsThatOfDdp) {
  batch_size_ = 24;
  const std::string flags = "--epochs 1 --channels-last";
  expect_trained("--nproc-per-node 2", "ddp", flags);
  expect_trained("--servers 2 --trainers 2", "sync", flags + " --strategy ps-sync");
  EXPECT_LE(difference(weights("ddp"), weights("sync")), kStepRounding);
  expect_trained("--servers 1 --trainers 2", "other",
                 flags + " --strategy ps-sync --weight-decay 1e-3");
  EXPECT_GT(difference(weights("ddp"), weights("other")), 5 * kStepRounding);
}

TEST_F(ImagenetServersTest, AsyncLearns) {
  // Late gradients act as momentum: of the rest there is less.
  expect_trained("--servers 1 --trainers 2", "run",
                 "--epochs 10 --strategy ps-async --momentum 0.5");
  const auto losses = train_losses("run");
  ASSERT_EQ(losses.size(), 10U);
  // Every epoch from the fifth on: a run that learns by luck in one epoch does not pass.
  for (size_t epoch = 4; epoch < losses.size(); ++epoch)
    EXPECT_LT(losses[epoch], 0.8 * losses[0]) << epoch;
}

TEST_F(ImagenetServersTest, ResumedRunIsBitEqualToOneNeverStopped) {
  const std::string flags = " --strategy ps-sync";
  expect_trained("--servers 1 --trainers 2", "whole", "--epochs 2" + flags);
  expect_trained("--servers 1 --trainers 2", "parts", "--epochs 1" + flags);
  const std::string resume = "--epochs 2 --resume " + folder_ / "parts/checkpoint";
  expect_refused(resume, "expected --strategy ps-sync or ps-async");
  // On another number of servers.
  expect_trained("--servers 2 --trainers 2", "parts", resume + flags);
  EXPECT_EQ(manifest("whole").at("files"), manifest("parts").at("files"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "parts/servers/epoch-2"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "parts/servers/epoch-1")) << "no longer needed";
  std::filesystem::remove_all(folder_ / "parts/servers/epoch-2");
  expect_refused("--epochs 3 --resume " + folder_ / "parts/checkpoint" + flags,
                 folder_ / "parts/servers/epoch-2" + ": expected a checkpoint of servers");
}

// Rank 1 kills itself once an epoch has made the first of its two steps: the first epoch in the first
// round, the second in the second.
TEST_F(ImagenetServersTest, KilledRanksGoOnWithTheSameBits) {
  const std::string flags = " --strategy ps-sync --epochs 3";
  expect_trained("--servers 2 --trainers 2", "calm", flags);
  const Ended ended =
      shell(bin("cohort") + " run --servers 2 --trainers 2 --max-restarts 2 --grace 1 -- sh -c '" +
            "if [ $RANK = 1 ] && [ $COHORT_RESTART_COUNT -lt 2 ]; then (until grep -q \"epoch "
            "$COHORT_RESTART_COUNT .1/2\" $COHORT_LOG_DIR/rank0.stdout.log; do sleep 0.01; done; "
            "kill -9 $$) & fi; exec " +
            bin("imagenet") + " " + folder_ / "data" + " --output " + folder_ / "run" +
            " --image-size 32 --batch-size 12 --workers 1 --lr 0.01 --seed 5 -p 1" + flags + "'");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("restart 2 of 2"), std::string::npos) << ended.output;
  EXPECT_EQ(manifest("calm").at("files"), manifest("run").at("files"));
}

TEST_F(ImagenetServersTest, WhatServersCannotDoIsRefused) {
  const std::string sync = "--strategy ps-sync ";
  expect_refused(sync + "--precision float64", "--precision float64: expected float32");
  expect_refused(sync + "--precision float16", "--precision float16: expected float32 or bfloat16");
  expect_refused(sync + "--start-epoch 3", "--start-epoch: expected none");
  expect_refused(sync + "--cpu-offload", "--cpu-offload: this run computes on the CPU");
  expect_refused(sync + "--ps-host-ranks 3",
                 "--ps-host-ranks 3: expected a divisor of the number of ranks, 2");
  expect_refused("--ps-host-ranks 2", "--ps-host-ranks: expected --strategy ps-sync or ps-async");
  expect_refused("--strategy ps-async --sync-bn", "--sync-bn: expected none");
  const std::string missing = folder_ / "missing.pem";
  expect_refused(sync + "--tls-authority " + missing,
                 missing + ": expected the authority's certificate in PEM form");
  expect_refused("--tls-authority " + missing, "expected --strategy ps-sync or ps-async");
  const Ended alone = run("--nproc-per-node 1", "refused", sync);
  EXPECT_EQ(alone.code, 2) << alone.output;
  EXPECT_NE(alone.output.find("cohort run --servers N --trainers M"), std::string::npos)
      << alone.output;
}

TEST(ImagenetServerRuleTest, LearningRateFallsToATenthEvery30EpochsAndPushesShareIt) {
  const imagenet::OptimizerOptions options{.learning_rate = 0.4, .steps_per_epoch = 7};
  const auto sync = imagenet::server_rule(options, 1);
  EXPECT_EQ(sync.learning_rate, 0.4F);
  EXPECT_EQ(sync.schedule.factor(30 * 7), 1);
  EXPECT_EQ(sync.schedule.factor(30 * 7 + 1), 0.1);
  EXPECT_NEAR(sync.schedule.factor(60 * 7 + 1), 0.01, 1e-15);
  EXPECT_EQ(imagenet::server_rule(options, 4).learning_rate, 0.1F);
}

}  // namespace imagenet_servers_test
