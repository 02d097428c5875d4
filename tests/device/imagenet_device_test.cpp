// SPDX-License-Identifier: Apache-2.0
// Training and evaluation of a ResNet on a device whose memory the host may not touch: bit by bit
// those of the CPU.
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/base/manifest.h"

#include "examples/imagenet/trainer.h"
#include "tests/base/temporary_folder.h"
#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/image/drawn_images.h"
#include "tests/support/message_of.h"
#include "tests/support/shared_folder.h"

namespace imagenet {
namespace imagenet_device_test {

using cohort::comm::ProcessGroup;

// Each epoch's scores, and the scores of a resumed run that only evaluates.
std::string scores_on(const ProcessGroup& group, Options options) {
  Trainer(options, group).train();
  std::string scores;
  if (group.rank() == 0) {
    std::istringstream rows(cohort::read_file(options.output + "/history.jsonl"));
    for (std::string line; std::getline(rows, line);) {
      auto row = nlohmann::json::parse(line);
      row.erase("images_per_s");
      row.erase("wait_share");
      scores += row.dump() + "\n";
    }
  }
  group.barrier("written");
  options.evaluate = true;
  options.resume = options.output + "/checkpoint";
  const Scores again = Trainer(options, group).evaluate();
  return scores + std::to_string(again.count) + " " + std::to_string(again.loss);
}

Options options_of(const cohort::test::SharedFolder& folder, const std::string& strategy,
                   bool sync_bn) {
  Options options{.data = folder / "data", .arch = "resnet18"};
  options.epochs = 2;
  options.image_size = 32;
  options.batch_size = 12;
  options.workers = 1;
  options.lr = 0.005;
  options.strategy = strategy;
  options.sync_bn = sync_bn;
  return options;
}

void expect_same_checkpoints(const std::string& expected, const std::string& got) {
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(expected)) {
    if (file.path().extension() != ".safetensors") continue;
    ++files;
    const std::string name = file.path().filename();
    EXPECT_TRUE(cohort::read_file(file.path()) == cohort::read_file(got + "/" + name)) << name;
  }
  EXPECT_GE(files, 2) << "weights and momentum";
}

// Sums of the host's numbers go over shm in a device's group, over Gloo on the CPU: of three ranks
// and more their last bits differ.
void expect_same_scores(const std::string& got, const std::string& expected, int num_ranks) {
  if (num_ranks == 2) {
    EXPECT_EQ(got, expected);
    return;
  }
  const std::regex number(R"([0-9]+\.?[0-9]*)");
  std::sregex_iterator one(got.begin(), got.end(), number);
  std::sregex_iterator other(expected.begin(), expected.end(), number);
  for (; one != std::sregex_iterator() && other != std::sregex_iterator(); ++one, ++other)
    EXPECT_NEAR(std::stod(one->str()), std::stod(other->str()), 1e-12) << got << expected;
  EXPECT_TRUE(one == other) << got << expected;
}

void expect_bits_of_the_cpu(const ProcessGroup& group, const cohort::test::SharedFolder& folder,
                            const std::string& strategy, bool sync_bn) {
  SCOPED_TRACE(strategy + ", ranks: " + std::to_string(group.size()));
  Options options = options_of(folder, strategy, sync_bn);
  options.output = folder / ("cpu-" + strategy);
  const auto expected = scores_on(cohort::test::on_cpu(group), options);
  options.output = folder / ("device-" + strategy);
  expect_same_scores(scores_on(group, options), expected, group.size());
  if (group.rank() == 0)
    expect_same_checkpoints(folder / ("cpu-" + strategy + "/checkpoint"),
                            options.output + "/checkpoint");
}

void expect_bits_of_the_cpu_on(int ranks) {
  const cohort::test::SharedFolder folder;
  if (folder.is_parent()) cohort::test::draw_image_folders(folder / "data", 8, 5, 40, 48);
  cohort::test::device_ranks(ranks, [&](const ProcessGroup& group) {
    EXPECT_EQ(group.device(), cohort::test::second_device());
    expect_bits_of_the_cpu(group, folder, "ddp", /*sync_bn=*/true);
    expect_bits_of_the_cpu(group, folder, "zero3", /*sync_bn=*/false);
  });
}

TEST(ImagenetDeviceTest, TwoRanksTrainAsOnTheCpu) {
  expect_bits_of_the_cpu_on(2);
}

TEST(ImagenetDeviceTest, ThreeRanksTrainAsOnTheCpu) {
  expect_bits_of_the_cpu_on(3);
}

// On the device a run that stopped after its first epoch, and resumes with the scale of its checkpoint.
void expect_steps_left_out(const ProcessGroup& group, const cohort::test::SharedFolder& folder,
                           const std::string& strategy) {
  SCOPED_TRACE(strategy);
  Options options = options_of(folder, strategy, /*sync_bn=*/true);
  options.precision = "float16";
  options.init_scale = 0x1p14;
  options.epochs = 2;  // Of a step each.
  options.output = folder / ("cpu-" + strategy);
  const std::string expected = options.output + "/checkpoint";
  Trainer(options, cohort::test::on_cpu(group)).train();
  options.output = folder / ("device-" + strategy);
  options.epochs = 1;
  Trainer(options, group).train();
  options.epochs = 2;
  options.resume = options.output + "/checkpoint";
  group.barrier("saved");
  Trainer(options, group).train();
  group.barrier("resumed");
  const RunState on_cpu = read_run(expected), got = read_run(options.resume);
  if (group.rank() == 0) expect_same_checkpoints(expected, options.resume);
  EXPECT_EQ(got.loss_scale, on_cpu.loss_scale);
  EXPECT_EQ(got.scale_age, on_cpu.scale_age);
  EXPECT_LT(got.loss_scale, options.init_scale) << "a step was left out";
  EXPECT_GE(got.scale_age, 1) << "a later one was not";
}

// From the checkpoint of the run above.
void expect_float32_without_scale(const ProcessGroup& group,
                                  const cohort::test::SharedFolder& folder) {
  Options options = options_of(folder, "ddp", /*sync_bn=*/true);
  options.epochs = 3;
  options.output = folder / "device-ddp";
  options.resume = options.output + "/checkpoint";
  group.barrier("read");
  Trainer(options, group).train();
  group.barrier("without a scale");
  EXPECT_EQ(read_run(options.resume).loss_scale, 0);
  EXPECT_EQ(read_run(options.resume).scale_age, 0);
}

TEST(ImagenetDeviceTest, Float16LeavesOutStepsThatOverflow) {
  const cohort::test::SharedFolder folder;
  if (folder.is_parent()) cohort::test::draw_image_folders(folder / "data", 4, 1, 40, 48);
  cohort::test::device_ranks(2, [&](const ProcessGroup& group) {
    expect_steps_left_out(group, folder, "ddp");
    expect_float32_without_scale(group, folder);
  });
}

TEST(ImagenetDeviceTest, Float16ShardsLeaveOutStepsThatOverflow) {
  const cohort::test::SharedFolder folder;
  if (folder.is_parent()) cohort::test::draw_image_folders(folder / "data", 4, 1, 40, 48);
  cohort::test::device_ranks(
      2, [&](const ProcessGroup& group) { expect_steps_left_out(group, folder, "zero3"); });
}

TEST(ImagenetDeviceTest, AScaleThatNoRunHasIsRefused) {
  const cohort::TemporaryFolder folder;
  const auto refusal = [&](const std::string& scale, const std::string& age) {
    cohort::Manifest manifest;
    manifest.update = 1;
    manifest.metadata = {{"arch", "resnet18"},
                         {"epochs_done", "1"},
                         {"best_top1", "1"},
                         {"loss_scale", scale},
                         {"scale_age", age}};
    std::ofstream(folder / "manifest.json") << manifest.to_json();
    return cohort::test::message_of<cohort::ConfigError>([&] { read_run(folder.path()); });
  };
  const std::string file = folder / "manifest.json";
  for (const std::string scale : {"0", "-1", "nan", "inf"}) {
    EXPECT_EQ(refusal(scale, "1"),
              file + ": loss_scale: expected a finite number above 0, found " + scale);
  }
  EXPECT_EQ(refusal("2", "-1"), file + ": scale_age: expected 0 or more, found -1");
  EXPECT_EQ(refusal("2", "0"), "nothing was thrown");
}

}  // namespace imagenet_device_test
}  // namespace imagenet
