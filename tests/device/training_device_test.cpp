// SPDX-License-Identifier: Apache-2.0
// A whole run of the translator on a device whose memory the host may not touch: training,
// validation with translation, checkpoints and resumption, bit by bit as on the CPU with the same
// operations.
#include <array>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "cohort/translate/training.h"
#include "cohort/translate/training_options.h"

#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/shared_folder.h"

namespace cohort::translate {
namespace training_device_test {

using parallel::Strategy;
namespace fs = std::filesystem;

// Words that are spelt backwards.
void write_text(const test::SharedFolder& folder) {
  const std::array<std::string, 10> words = {"red",   "green", "blue", "one", "two",
                                             "three", "cat",   "dog",  "sun", "moon"};
  for (const auto& [name, count] : {std::pair{"train", 300}, {"valid", 12}}) {
    std::ofstream en(folder / (name + std::string(".en")));
    std::ofstream xx(folder / (name + std::string(".xx")));
    for (int i = 0; i < count; ++i) {
      std::string source, target;
      for (int k = 0; k <= i % 5; ++k) {
        const std::string& word =
            words[static_cast<size_t>(i * 7 + k * (3 + i / 10)) % words.size()];
        source += (k > 0 ? " " : "") + word;
        target += (k > 0 ? " " : "") + std::string(word.rbegin(), word.rend());
      }
      en << source << "\n";
      xx << target << "\n";
    }
  }
}

TrainingOptions options_of(const test::SharedFolder& folder, const std::string& run,
                           Strategy strategy) {
  TrainingOptions options;
  options.train_sets = {folder / "train.en", folder / "train.xx"};
  options.valid_sets = {folder / "valid.en", folder / "valid.xx"};
  options.model_dir = folder / run;
  options.model = {.dim_vocab_source = 60,
                   .dim_vocab_target = 60,
                   .dim_emb = 32,
                   .heads = 2,
                   .enc_depth = 1,
                   .dec_depth = 1,
                   .dim_ffn = 64,
                   .dropout = 0.1};
  options.strategy = strategy;
  options.mini_batch = 16;
  options.optimizer_delay = 2;
  options.learn_rate = 5e-3;
  options.lr_warmup = 4;
  options.exponential_smoothing = 0.1;
  options.after_batches = 6;
  options.valid_freq_updates = 3;
  options.evaluation.search.beam_size = 2;
  options.evaluation.search.max_length = 10;
  options.quiet = true;
  options.log_level = LogLevel::kWarn;
  return options;
}

std::string content_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The tensors of checkpoints and the translations.
void expect_same_files(const fs::path& expected, const fs::path& got) {
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(expected)) {
    const fs::path name = fs::relative(entry.path(), expected);
    const bool is_checkpoint = name.has_parent_path() && name.extension() == ".safetensors";
    if (!is_checkpoint && name != "result-dev.txt") continue;
    ++files;
    EXPECT_TRUE(content_of(entry.path()) == content_of(got / name)) << name;
  }
  EXPECT_GE(files, 4) << "of best/ and last/, and the translations";
}

void expect_run_of_the_cpu(const comm::ProcessGroup& group, const test::SharedFolder& folder,
                           Strategy strategy) {
  SCOPED_TRACE(to_string(strategy));
  const test::AtenKernels same_operations;
  const comm::ProcessGroup cpu = test::on_cpu(group);
  const std::string name = to_string(strategy) + std::to_string(group.size());
  const auto on_cpu = train(options_of(folder, "cpu-" + name, strategy), cpu);
  // The second half on the device resumes what the CPU began, so its checkpoints are read, too.
  auto first_half = options_of(folder, "mixed-" + name, strategy);
  first_half.after_batches = 3;
  train(first_half, cpu);
  for (const char* run : {"device-", "mixed-"}) {
    SCOPED_TRACE(run);
    const auto on_device = train(options_of(folder, run + name, strategy), group);
    EXPECT_EQ(on_device.updates, 6);
    ASSERT_TRUE(on_device.best && on_cpu.best);
    EXPECT_EQ(on_device.best->loss, on_cpu.best->loss);
    EXPECT_EQ(on_device.best->bleu, on_cpu.best->bleu);
    if (group.rank() == 0) expect_same_files(folder / ("cpu-" + name), folder / (run + name));
    group.barrier("compared");
  }
}

TEST(TrainingDeviceTest, TwoRanksTrainAsOnTheCpu) {
  const test::SharedFolder folder;
  if (folder.is_parent()) write_text(folder);
  test::device_ranks(2, [&](const comm::ProcessGroup& group) {
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero3})
      expect_run_of_the_cpu(group, folder, strategy);
  });
}

TEST(TrainingDeviceTest, ThreeRanksTrainAsOnTheCpu) {
  const test::SharedFolder folder;
  if (folder.is_parent()) write_text(folder);
  test::device_ranks(3, [&](const comm::ProcessGroup& group) {
    expect_run_of_the_cpu(group, folder, Strategy::kZero2);
  });
}

TEST(TrainingDeviceTest, OneRankTrainsAsOnTheCpu) {
  const test::SharedFolder folder;
  if (folder.is_parent()) write_text(folder);
  test::device_ranks(1, [&](const comm::ProcessGroup& group) {
    expect_run_of_the_cpu(group, folder, Strategy::kDdp);
    auto options = options_of(folder, "fit", Strategy::kDdp);
    options.mini_batch = 0;
    options.mini_batch_fit = true;
    options.workspace_mib = 1;
    options.after_batches = 1;
    EXPECT_EQ(train(options, group).updates, 1);
    EXPECT_NE(content_of(folder / "fit/last/manifest.json").find("device=mtia"), std::string::npos);
  });
}

TEST(TrainingDeviceTest, BatchesOfAShardedModelAreFittedToTheDevice) {
  const test::SharedFolder folder;
  if (folder.is_parent()) write_text(folder);
  test::device_ranks(2, [&](const comm::ProcessGroup& group) {
    for (const bool offload : {false, true}) {
      auto options = options_of(folder, offload ? "offload" : "zero3", Strategy::kZero3);
      options.cpu_offload = offload;
      options.mini_batch = 0;
      options.mini_batch_fit = true;
      options.workspace_mib = 1;
      options.after_batches = 1;
      EXPECT_EQ(train(options, group).updates, 1);
    }
  });
}

}  // namespace training_device_test
}  // namespace cohort::translate
