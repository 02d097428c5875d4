// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_record.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort::translate {
namespace run_record_test {

namespace fs = std::filesystem;
using nlohmann::json;

class RunRecordTest : public testing::Test {
 protected:
  RunRecordTest() {
    options_.model_dir = folder_.path();
    options_.disp_freq_updates = 10;
    for (int i = 0; i < 10; ++i) {
      valid_.source.push_back("source " + std::to_string(i));
      valid_.target.push_back("target " + std::to_string(i));
    }
  }
  RunRecord make(int64_t update = 0) {
    return {options_,
            {.update = update,
             .num_parameters = 12,
             .train_pairs = 100,
             .machines = {describe_machine(), describe_machine()}},
            valid_,
            log_};
  }
  static TrainedUpdate trained(int64_t update, bool skipped = false) {
    return {.epoch = 1,
            .update = update,
            .run_seconds = 0.5 * static_cast<double>(update),
            .skipped = skipped,
            .loss_sum = skipped ? NAN : 100.0 * static_cast<double>(update),
            .tokens = 50,
            .gradient_norm = skipped ? NAN : 2,
            .learning_rate = 1e-3,
            .own_seconds = 0.5,
            .rank_tokens_per_s = {60, 40}};
  }
  static Validation validation(int64_t update) {
    return {
        .epoch = 1, .update = update, .scores = {.loss = 2, .bleu = 20, .chrf = 40}, .best = true};
  }
  std::vector<json> lines(const std::string& type) const {
    std::vector<json> found;
    std::istringstream file(read_file(folder_ / "history.jsonl"));
    for (std::string line; std::getline(file, line);) {
      json parsed = json::parse(line);
      if (parsed["type"] == type) found.push_back(std::move(parsed));
    }
    return found;
  }
  std::vector<std::string> translations() const { return {10, "said"}; }

  TemporaryFolder folder_;
  TrainingOptions options_;
  text::ParallelText valid_;
  Log log_{{.file = folder_ / "log", .console = LogConsole::kNever}};
};

TEST_F(RunRecordTest, ALineAboutTrainingHoldsTheMeansSinceTheLast) {
  RunRecord record = make();
  for (int64_t update = 1; update <= 20; ++update) record.trained(trained(update));
  record.trained(trained(20, /*skipped=*/true));
  record.trained(trained(21));
  record.ended({.stop_reason = "enough", .epochs = 1, .updates = 21}, 11);
  const auto found = lines("train");
  ASSERT_EQ(found.size(), 3);
  EXPECT_EQ(found[1]["update"], 20);
  EXPECT_EQ(found[1]["updates"], 10);
  EXPECT_DOUBLE_EQ(found[1]["loss"], 100 * 15.5 / 50);  // Updates 11 to 20.
  EXPECT_DOUBLE_EQ(found[1]["gradient_norm"], 2);
  EXPECT_DOUBLE_EQ(found[1]["tgt_tokens_per_s"], 100);
  EXPECT_EQ(found[1]["rank_tokens_per_s"], json::parse("[60.0,40.0]"));
  EXPECT_EQ(found[2]["updates"], 1);
  EXPECT_EQ(found[2]["skipped"], 1);
  EXPECT_DOUBLE_EQ(found[2]["loss"], 42) << "what was skipped is in no mean";
  EXPECT_DOUBLE_EQ(found[2]["tgt_tokens_per_s"], 50) << "but its time counts";
  EXPECT_EQ(lines("end")[0]["reason"], "enough");
  EXPECT_EQ(lines("start")[0]["hosts"].size(), 2);
}

TEST_F(RunRecordTest, ByDefaultALineComesAfterSomeTimeAndAtAValidation) {
  options_.disp_freq_updates = 0;
  options_.disp_freq_s = 3600;
  RunRecord record = make();
  for (int64_t update = 1; update <= 1000; ++update) record.trained(trained(update));
  EXPECT_EQ(lines("train").size(), 0);
  record.validated(validation(1000), translations());
  ASSERT_EQ(lines("train").size(), 1);
  EXPECT_EQ(lines("train")[0]["updates"], 1000);
  const json valid = lines("valid").at(0);
  EXPECT_EQ(valid["valid_bleu"], 20);
  EXPECT_EQ(valid["samples"].size(), 5);
  EXPECT_EQ(lines("start")[0]["sample_sources"][1], "source 2");
  EXPECT_TRUE(fs::exists(folder_ / "report.html"));
  EXPECT_EQ(read_file(folder_ / "result-dev.txt").find("S source 0\nH said\nR target 0\n\n"), 0);
}

// Three ranks on two hosts with two GPUs each: the hosts' first ranks have looked.
TEST_F(RunRecordTest, AValidationHoldsTheGpusOfAllHosts) {
  const auto machine = [](const char* host) {
    json described = json::parse(describe_machine());
    described["host"] = host;
    described["gpus"] = json::parse(
        R"([{"name": "NVIDIA One", "memory_gib": 80.0}, {"name": "NVIDIA Two", "memory_gib": null}])");
    return described.dump();
  };
  RunRecord record(options_,
                   {.machines = {machine("node-a"), machine("node-a"), machine("node-b")}}, valid_,
                   log_);
  Validation now = validation(10);
  now.gpu_use = {"[[87.5, 99.0, 12.0, 13.0], [null, null, null, null]]", "",
                 "[[50.0, 70.0, 20.0, 24.0], [60.0, 61.0, 1.0, 2.0]]"};
  record.validated(now, translations());
  record.validated(validation(20), translations());  // Nobody has said anything.
  const json first = lines("valid").at(0), second = lines("valid").at(1);
  EXPECT_EQ(first["gpu_percent"], json::parse("[87.5, null, 50.0, 60.0]"));
  EXPECT_EQ(first["gpu_percent_peak"], json::parse("[99.0, null, 70.0, 61.0]"));
  EXPECT_EQ(first["gpu_memory_gib"], json::parse("[12.0, null, 20.0, 1.0]"));
  EXPECT_EQ(first["gpu_memory_gib_peak"], json::parse("[13.0, null, 24.0, 2.0]"));
  EXPECT_EQ(second["gpu_percent"], json::parse("[null, null, null, null]"));
  record.ended({}, 1);
  const std::string page = read_file(folder_ / "report.html");
  for (const char* row :
       {"<td>node-a</td><td>0</td><td>NVIDIA One</td><td>80</td><td>12 / 13</td><td>87.5 / 99</td>",
        "<td>node-b</td><td>3</td><td>NVIDIA Two</td><td>\xE2\x80\x93</td><td>1 / 2</td>"
        "<td>60 / 61</td>"}) {
    EXPECT_NE(page.find(row), std::string::npos) << row;
  }
}

TEST_F(RunRecordTest, WithoutTranslationsThereAreNoScores) {
  RunRecord record = make();
  record.validated({.epoch = 1, .scores = {.loss = 2}}, {});
  EXPECT_TRUE(lines("valid")[0]["valid_bleu"].is_null());
  EXPECT_FALSE(fs::exists(folder_ / "result-dev.txt"));
}

TEST_F(RunRecordTest, AResumedRunDropsWhatItDoesAgain) {
  {
    RunRecord killed = make();
    for (int64_t update = 1; update <= 50; ++update) killed.trained(trained(update));
  }
  RunRecord resumed = make(30);
  for (int64_t update = 31; update <= 40; ++update) resumed.trained(trained(update));
  std::vector<int64_t> updates;
  for (const json& line : lines("train")) updates.push_back(line["update"]);
  EXPECT_EQ(updates, (std::vector<int64_t>{10, 20, 30, 40}));
  EXPECT_EQ(lines("start").size(), 2);
  int event_files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder_ / "tensorboard"))
    ++event_files;
  EXPECT_EQ(event_files, 2);
}

TEST_F(RunRecordTest, AValidationThatIsMadeAgainIsThereOnce) {
  const auto start = [&](bool is_validated) {
    return RunRecord(options_,
                     {.update = 30, .is_validated = is_validated, .machines = {describe_machine()}},
                     valid_, log_);
  };
  start(false).validated(validation(30), translations());
  start(false).validated(validation(30), translations());
  EXPECT_EQ(lines("valid").size(), 1) << "the checkpoint did not know of it";
  start(true);
  EXPECT_EQ(lines("valid").size(), 1) << "it does";
  EXPECT_EQ(lines("start").size(), 3);
}

TEST_F(RunRecordTest, TheConfigurationHoldsEveryOption) {
  options_.valid_metrics = {ValidMetric::kChrf, ValidMetric::kLoss};
  options_.evaluation.search.min_length = 3;
  options_.log_level = LogLevel::kWarn;
  make();
  const json config = json::parse(read_file(folder_ / "config.json"));
  EXPECT_EQ(config["valid_metrics"], json::parse(R"(["chrf", "ce-mean-words"])"));
  EXPECT_EQ(config["log_level"], "warn");
  EXPECT_EQ(config["disp_freq"], "10u");
  EXPECT_EQ(config["valid_freq"], "1e");
  EXPECT_EQ(config["optimizer_params"], json::parse("[0.9, 0.98, 1e-9]"));
  EXPECT_TRUE(config["learn_rate"].is_null());
  EXPECT_EQ(config["strategy"], "ddp");
  EXPECT_EQ(config["min_output_length"], 3);
  for (const char* name : {"train_sets",
                           "valid_sets",
                           "vocabs",
                           "joined_dictionary",
                           "sentencepiece_max_lines",
                           "model_dir",
                           "cache_dir",
                           "overwrite",
                           "strategy",
                           "tensor_parallel",
                           "precision",
                           "gradient_checkpointing",
                           "cpu_offload",
                           "optimizer_state_dir",
                           "optimizer_params",
                           "learn_rate",
                           "mini_batch",
                           "mini_batch_words",
                           "mini_batch_fit",
                           "workspace",
                           "maxi_batch",
                           "max_length",
                           "max_length_crop",
                           "optimizer_delay",
                           "noam_factor",
                           "lr_warmup",
                           "clip_norm",
                           "exponential_smoothing",
                           "seed",
                           "after_epochs",
                           "after_batches",
                           "time_limit",
                           "valid_metrics",
                           "early_stopping",
                           "valid_on_start",
                           "valid_freq",
                           "valid_mini_batch_words",
                           "tokenize",
                           "beam_size",
                           "normalize",
                           "word_penalty",
                           "allow_unk",
                           "max_length_factor",
                           "min_output_length",
                           "max_output_length",
                           "save_freq",
                           "save_interval_updates",
                           "keep_interval_updates",
                           "disp_freq",
                           "profile_steps",
                           "quiet",
                           "log_level",
                           "world_size",
                           "train_pairs",
                           "model.dim_emb"})
    EXPECT_TRUE(config.contains(name)) << name;
  const json start = lines("start")[0];
  for (const auto& [name, count] : config["train_pairs"].items())
    EXPECT_EQ(start["pairs_" + name], count) << name;
}

// Folders stand where files should be written: no right is needed to be refused there.
TEST_F(RunRecordTest, WhatCannotBeWrittenIsSaidOnceAndTrainingContinues) {
  RunRecord record = make();
  fs::create_directories(folder_ / "report.html/x");
  fs::create_directories(folder_ / "result-dev.txt/x");
  record.validated(validation(1), translations());
  record.validated(validation(2), translations());
  record.ended({.stop_reason = "enough"}, 1);
  EXPECT_EQ(lines("valid").size(), 2) << "the other files are written";
  const std::string log = read_file(folder_ / "log");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 2) << log;
  EXPECT_NE(log.find("error a file of the record was not written; training continues "
                     "file=report.html why="),
            std::string::npos)
      << log;
  EXPECT_NE(log.find("Is a directory"), std::string::npos) << log;
}

TEST_F(RunRecordTest, WhatCannotBeWrittenAtTheStartEndsTheRun) {
  write_file(folder_ / "tensorboard", "");
  try {
    make();
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error), folder_ / "tensorboard" + " cannot be made: Not a directory");
  }
}

}  // namespace run_record_test
}  // namespace cohort::translate
