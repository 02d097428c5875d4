// SPDX-License-Identifier: Apache-2.0
// What becomes of checkpoints that cannot be written. A file in the way of a folder stands for a
// disk that is full: no right is needed to be refused there.
#include "cohort/translate/run_checkpoints.h"

#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/translate/run_data.h"
#include "cohort/translate/run_folder.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::translate {
namespace run_checkpoints_test {

namespace fs = std::filesystem;

// Of --vocabs that are in neither run's folder.
TEST(FreshFilesTest, TwoRunsMayMakeOneVocabularyAtOnce) {
  const TemporaryFolder folder;
  const fs::path file = folder / "v.spm";
  FreshFiles first("1"), second("2");
  for (auto [fresh, content] : {std::pair{&first, "first"}, {&second, "second"}}) {
    fresh->add(file);
    write_file(fresh->beside(file), content);
  }
  EXPECT_EQ(read_file(first.now(file)), "first");
  first.keep();
  EXPECT_EQ(read_file(first.now(file)), "first");
  EXPECT_EQ(read_file(second.now(file)), "second");
  EXPECT_NO_THROW(second.keep());
  EXPECT_EQ(read_file(file), "second");
}

TEST(FreshFilesTest, ARunKeepsTheVocabularyThatItHasRead) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "run");
  TrainingOptions options;
  options.model_dir = folder / "run";
  options.vocabs = {folder / "a.spm", folder / "b.spm"};
  FreshFiles fresh("1");
  for (const fs::path& file : options.vocabs) {
    fresh.add(file);
    write_file(fresh.beside(file), "own");
    write_file(file, "another run's");
  }
  keep_vocabularies(options, fresh);
  for (const char* kept : {"run/source.spm", "run/target.spm"})
    EXPECT_EQ(read_file(folder / kept), "own");
}

class RunCheckpointsTest : public testing::Test {
 protected:
  RunCheckpointsTest() {
    options_.model_dir = folder_.path();
    for (const char* side : {"source", "target"})
      write_file(folder_ / (std::string(side) + ".spm"), side);
  }
  // After `updates`, with a best validation of `best_update`.
  static RunState state(int64_t updates, int64_t best_update) {
    const double bleu = 20 + static_cast<double>(best_update) / 3;
    return {.updates = updates,
            .early_stopping = {.best = bleu},
            .best = ValidScores{.loss = 2, .bleu = bleu, .chrf = 40},
            .best_update = best_update};
  }
  static train::ShardedParts parts(double value) {
    return {{"weights", {{"w", {3}, 0, 3, at::full({3}, value)}}}};
  }
  std::string update_in(const std::string& name) const {
    return train::read_manifest(folder_ / name).at("update");
  }
  double weight_in(const std::string& name) const {
    const at::Tensor found = at::zeros({3});
    train::load_checkpoint(folder_ / name, train::Parts{{"weights", {{"w", found}}}});
    return found[0].item<double>();
  }

  TemporaryFolder folder_;
  TrainingOptions options_;
  Log log_{{.file = folder_ / "log", .console = LogConsole::kNever}};
  comm::ProcessGroup alone_{comm::RankInfo{}};
};

TEST_F(RunCheckpointsTest, ARunThatEndedBeforeItsFirstCheckpointMayBeginAgain) {
  const std::string begun = R"({"type":"start","update":0})"
                            "\n";
  const auto start_with = [&](const std::string& history) {
    write_file(folder_ / "history.jsonl", history);
    return find_start(options_);
  };
  fs::create_directory(folder_ / "last");
  write_file(folder_ / "last/weights-0.safetensors", "half");
  EXPECT_EQ(start_with(begun), Start::kFresh);
  EXPECT_EQ(start_with(begun +
                       R"({"type":"end","update":0})"
                       "\n" +
                       begun + R"({"type":"st)"),
            Start::kFresh);
  for (const char* later :
       {R"({"type":"train","update":1})", R"({"type":"end","update":3})", "1", "[]", "no JSON"})
    EXPECT_THROW(start_with(begun + later + "\n"), ConfigError) << later;
  EXPECT_THROW(start_with(""), ConfigError);
  for (const char* made : {"best", "checkpoints"}) {
    fs::create_directory(folder_ / made);
    EXPECT_THROW(start_with(begun), ConfigError) << made;
    fs::remove(folder_ / made);
  }
  EXPECT_EQ(start_with(begun), Start::kFresh);
}

// A node that comes or goes begins a round that is no restart.
TEST_F(RunCheckpointsTest, OverwriteReplacesNoRunOfTheSameJob) {
  const auto start_as = [&](const char* job, const char* round) {
    ::setenv("COHORT_JOB_ID", job, 1);
    ::setenv("COHORT_ROUND", round, 1);
    TrainingOptions options = options_;
    options.overwrite = true;
    return find_start(options);
  };
  EXPECT_EQ(start_as("one", "1"), Start::kFresh);
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  checkpoints.save_last(state(7, 7), parts(7));
  checkpoints.finish();
  EXPECT_EQ(start_as("one", "1"), Start::kFresh);
  EXPECT_EQ(start_as("one", "2"), Start::kResume);
  EXPECT_EQ(start_as("two", "2"), Start::kFresh);
}

TEST_F(RunCheckpointsTest, AValidationIsKnownWhetherItsBestIsThereOrNot) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  EXPECT_FALSE(checkpoints.read_best(alone_).scores);
  checkpoints.save_best(state(7, 7), parts(7).at("weights"));
  checkpoints.save_last(state(7, 7), parts(7));
  checkpoints.finish();
  EXPECT_EQ(checkpoints.read_best(alone_).update, 7);
  EXPECT_EQ(checkpoints.read_best(alone_).scores->bleu, state(7, 7).best->bleu);
  fs::remove_all(folder_ / "best");
  EXPECT_TRUE(checkpoints.read_last(alone_).is_validated());
  EXPECT_FALSE(RunState{}.is_validated());
}

TEST_F(RunCheckpointsTest, TheBestIsWrittenOnceMoreWhenItCanBe) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  write_file(folder_ / "best", "in the way");
  train::ShardedParts now = parts(7);
  checkpoints.save_best(state(7, 7), now.at("weights"));
  now.at("weights")[0].tensor.fill_(8);  // trained on
  checkpoints.save_last(state(8, 7), now);
  fs::remove(folder_ / "best");
  checkpoints.save_last(state(9, 7), now);
  checkpoints.finish();
  EXPECT_EQ(update_in("best"), "7");
  EXPECT_EQ(weight_in("best"), 7) << "of then, not of now";
  EXPECT_EQ(update_in("last"), "9");
  EXPECT_NE(read_file(folder_ / "log").find("a checkpoint was not written"), std::string::npos);
}

// The servers' checkpoint of a save is there before the save before it is a checkpoint.
TEST_F(RunCheckpointsTest, TheServersCheckpointThatLastNamesIsThere) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  const auto save = [&](int64_t update) {
    RunState now = state(update, 0);
    now.servers = folder_ / ("servers/update-" + std::to_string(update));
    fs::create_directories(now.servers);
    checkpoints.save_last(now, parts(1));
  };
  for (int64_t update = 1; update <= 3; ++update) save(update);
  checkpoints.finish_save();
  EXPECT_EQ(update_in("last"), "3");
  EXPECT_TRUE(fs::exists(folder_ / "servers/update-3"));
  EXPECT_FALSE(fs::exists(folder_ / "servers/update-1"));
  EXPECT_FALSE(fs::exists(folder_ / "servers/update-2"));
}

// The text was read when the run began; its files may change or go.
TEST_F(RunCheckpointsTest, ASaveSaysTheValidationTextThatWasRead) {
  write_file(folder_ / "dev.tsv", "a\tb\n");
  options_.valid_sets = {folder_ / "dev.tsv"};
  const std::string sum = read_valid_text(options_).sha256;
  write_file(folder_ / "dev.tsv", "c\td\n");
  RunCheckpoints checkpoints(options_, "text", sum, log_);
  checkpoints.save_with(alone_);
  checkpoints.save_last(state(1, 0), parts(1));
  fs::remove(folder_ / "dev.tsv");
  checkpoints.save_last(state(2, 0), parts(1));
  checkpoints.finish();
  EXPECT_EQ(train::read_manifest(folder_ / "last").at("valid_sets_sha256"), sum);
  EXPECT_EQ(update_in("last"), "2");
}

TEST_F(RunCheckpointsTest, ARunThatWasKilledSavesItsBestAgain) {
  for (const double weight : {7.0, 8.0}) {
    RunCheckpoints checkpoints(options_, "text", "valid", log_);
    checkpoints.save_with(alone_);
    checkpoints.save_best(state(7, 7), parts(weight).at("weights"));
    checkpoints.save_last(state(7, 7), parts(weight));
    checkpoints.finish();
    EXPECT_EQ(weight_in("best"), weight);
  }
}

TEST_F(RunCheckpointsTest, ABestThatIsNotThereAtTheEndIsAnError) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  write_file(folder_ / "best", "in the way");
  checkpoints.save_best(state(7, 7), parts(7).at("weights"));
  checkpoints.save_last(state(8, 7), parts(8));
  EXPECT_ANY_THROW(checkpoints.finish());
  EXPECT_EQ(update_in("last"), "8");
  // Such a run resumes with the best that there is: none.
  fs::remove(folder_ / "best");
  const RunState none = RunCheckpoints(options_, "text", "valid", log_).read_last(alone_);
  EXPECT_FALSE(none.best);
  EXPECT_FALSE(none.early_stopping.best);
}

TEST_F(RunCheckpointsTest, ARunGoesOnWithTheBestThatIsThere) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  checkpoints.save_best(state(3, 3), parts(3).at("weights"));
  checkpoints.save_last(state(5, 3), parts(5));
  checkpoints.finish();
  EXPECT_EQ(checkpoints.read_last(alone_).best, state(5, 3).best);
  checkpoints.save_last(state(8, 7), parts(8));  // best/ of 7 was lost
  checkpoints.finish();
  const RunState found = checkpoints.read_last(alone_);
  EXPECT_EQ(found.updates, 8);
  EXPECT_EQ(found.best_update, 3);
  EXPECT_EQ(found.best, state(3, 3).best) << "to the last bit";
  EXPECT_EQ(found.early_stopping.best, state(3, 3).early_stopping.best);
}

TEST_F(RunCheckpointsTest, ABestThatIsNoRunsIsNamed) {
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  checkpoints.save_last(state(5, 3), parts(5));
  checkpoints.finish();
  for (const auto& [metadata, found] :
       {std::pair{train::Metadata{}, "none"}, {train::Metadata{{"update", "soon"}}, "soon"}}) {
    train::save_checkpoint(folder_ / "best", train::Parts{{"weights", {{"w", at::ones({3})}}}}, 3,
                           metadata);
    EXPECT_EQ(test::message_of<ConfigError>([&] { checkpoints.read_last(alone_); }),
              folder_ /
                      "best/manifest.json: expected the metadata entry update of a training run's "
                      "checkpoint, a number, got " +
                  std::string(found));
  }
}

TEST_F(RunCheckpointsTest, ThoseOfUpdatesThatAreMadeAgainGo) {
  options_.keep_interval_updates = 2;
  const auto kept = [&] { return kept_updates(options_.model_dir); };
  {
    RunCheckpoints killed(options_, "text", "valid", log_);
    killed.save_with(alone_);
    for (const int64_t update : {40, 80, 90}) killed.save_kept(state(update, 10), parts(1));
    killed.finish();
    EXPECT_EQ(kept(), (std::vector<int64_t>{80, 90}));
  }
  RunCheckpoints resumed(options_, "text", "valid", log_);
  resumed.save_with(alone_);
  resumed.remove_kept_after(80);
  resumed.save_kept(state(85, 10), parts(1));
  resumed.finish();
  EXPECT_EQ(kept(), (std::vector<int64_t>{80, 85}));
}

TEST_F(RunCheckpointsTest, EarlierOnesGoOnlyForOnesThatAreThere) {
  options_.keep_interval_updates = 2;
  RunCheckpoints checkpoints(options_, "text", "valid", log_);
  checkpoints.save_with(alone_);
  const auto kept = [&] { return kept_updates(options_.model_dir); };
  for (const int64_t update : {10, 20}) checkpoints.save_kept(state(update, 10), parts(1));
  checkpoints.finish();
  write_file(folder_ / "checkpoints/30", "in the way");
  checkpoints.save_kept(state(30, 10), parts(1));
  checkpoints.save_last(state(30, 10), parts(1));
  checkpoints.finish();
  EXPECT_EQ(kept(), (std::vector<int64_t>{10, 20}));
  checkpoints.save_kept(state(40, 10), parts(1));
  checkpoints.finish();
  EXPECT_EQ(kept(), (std::vector<int64_t>{20, 40}));
  EXPECT_FALSE(fs::exists(folder_ / "checkpoints/10"));
}

}  // namespace run_checkpoints_test
}  // namespace cohort::translate
