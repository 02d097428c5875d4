// SPDX-License-Identifier: Apache-2.0
// Every strategy trains the same model, and resumes from every other's checkpoints.
#include <array>
#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <optional>
#include <torch/types.h>

#include "cohort/train/sharded_checkpoint.h"
#include "cohort/translate/updater.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace strategies_test {

using parallel::Strategy;

// As updater_test.cpp's, over more updates. A wrong gradient moves parameters by the rate, 1e-3.
constexpr double kRounding = 1e-8;
constexpr int kBatches = 12;  // Of an update: for 1, 2, 3 or 4 ranks.

// One matrix for source, target and output; dropout; most updates are clipped.
nmt::Transformer make_model() {
  auto options = test::tiny_options();
  options.dropout = 0.3;
  options.tied_embeddings_all = true;
  nmt::Transformer model(options);
  model->initialise(7);
  model->to(at::kDouble);
  return model;
}

UpdaterOptions options_of(Strategy strategy) {
  return {.strategy = strategy,
          .schedule = {.factor = 0.05, .width = 16, .warmup = 3},
          .clip_norm = 0.8,
          .exponential_smoothing = 0.3};
}

// Batch i of a rank is number i * (number of ranks) + rank of the update, as Updater counts.
std::vector<nmt::Batch> batches_of(int update, int rank, int num_ranks) {
  const auto sentences = test::make_sentences(2 * kBatches, static_cast<uint32_t>(update));
  std::vector<nmt::Batch> batches;
  for (int number = rank; number < kBatches; number += num_ranks) {
    const auto first = sentences.begin() + 2 * number;
    batches.push_back(test::make_test_batch({first, first + 2}));
  }
  return batches;
}

void train(Updater& updater, const comm::ProcessGroup& group, int first, int last) {
  for (int update = first; update <= last; ++update)
    EXPECT_FALSE(updater.update(batches_of(update, group.rank(), group.size())).skipped) << update;
}

// What one process has after a number of updates: parameters, then averages.
class Alone {
 public:
  explicit Alone(int num_updates) {
    comm::ProcessGroup alone(comm::RankInfo{});
    auto model = make_model();
    Updater updater(model, alone, options_of(Strategy::kDdp));
    train(updater, alone, 1, num_updates);
    for (const at::Tensor& each : model->parameters()) parameters_.push_back(each.detach().clone());
    averages_ = updater.average()->averages();
  }

  void expect_equal(nmt::Transformer& model, Updater& updater) const {
    {
      const auto whole = updater.model().unsharded();
      EXPECT_LE(difference(model, parameters_), kRounding) << "of the parameters";
    }
    const optim::AveragesInPlace smoothed(updater.average());
    const auto whole = updater.model().unsharded();
    EXPECT_LE(difference(model, averages_), kRounding) << "of the averages";
  }

 private:
  // NaN if any is.
  static double difference(nmt::Transformer& model, const std::vector<at::Tensor>& expected) {
    std::vector<at::Tensor> largest;
    const auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      largest.push_back((parameters[i] - expected[i]).abs().max());
    return at::stack(largest).max().item<double>();
  }

  std::vector<at::Tensor> parameters_, averages_;
};

void expect_the_same_training(const comm::ProcessGroup& group,
                              const std::vector<Strategy>& strategies) {
  constexpr int kUpdates = 20;
  const Alone alone(kUpdates);
  for (const Strategy strategy : strategies) {
    SCOPED_TRACE(parallel::to_string(strategy));
    auto model = make_model();
    Updater updater(model, group, options_of(strategy));
    train(updater, group, 1, kUpdates);
    alone.expect_equal(model, updater);
  }
}

// Accumulation, clipping, dropout, tied weights, averages.
TEST(StrategiesTest, TwentyUpdatesOfTwoRanksAreOneProcesss) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    expect_the_same_training(
        group, {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3});
  });
}

TEST(StrategiesTest, TwentyUpdatesOfFourRanksAreOneProcesss) {
  test::ranks(4, [](const comm::ProcessGroup& group) {
    expect_the_same_training(
        group, {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3});
  });
}

TEST(StrategiesTest, HybridOnTwoHostsIsOneProcesssTraining) {
  test::ranks(4, [](const comm::ProcessGroup& group) {
    test::on_hosts(group, {"a", "a", "b", "b"}, [](const comm::ProcessGroup& hosts) {
      expect_the_same_training(hosts, {Strategy::kHybrid});
    });
  });
}

// Saves and loads as a run does.
void save(Updater& updater, const std::string& folder, int update) {
  const comm::ProcessGroup writers = updater.model().checkpoint_writers();
  if (!writers) return;
  train::ShardedCheckpointWriter writer(writers);
  writer.begin(folder, updater.parts(), update, {});
  writer.commit();
}

// A folder that the ranks of several jobs of one test case find.
class JobsFolder {
 public:
  JobsFolder() {
    if (const char* known = std::getenv(kVariable)) {
      path_ = known;
    } else {
      path_ = own_.emplace().path();
      setenv(kVariable, path_.c_str(), 1);
    }
  }
  ~JobsFolder() { unsetenv(kVariable); }
  JobsFolder(const JobsFolder&) = delete;
  JobsFolder& operator=(const JobsFolder&) = delete;
  std::string of(Strategy strategy, int num_ranks) const {
    return path_ + "/" + parallel::to_string(strategy) + "-" + std::to_string(num_ranks);
  }

 private:
  static constexpr const char* kVariable = "COHORT_TEST_JOBS_FOLDER";
  std::optional<TemporaryFolder> own_;
  std::string path_;
};

constexpr int kSavedAt = 2, kLoadedTo = 4;
constexpr std::array kSaved{Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3};

void save_with_every_strategy(const comm::ProcessGroup& group, const JobsFolder& folder) {
  for (const Strategy strategy : kSaved) {
    Updater updater(make_model(), group, options_of(strategy));
    train(updater, group, 1, kSavedAt);
    save(updater, folder.of(strategy, group.size()), kSavedAt);
  }
}

void go_on_from_every_checkpoint(const comm::ProcessGroup& group, const JobsFolder& folder) {
  const Alone undisturbed(kLoadedTo);
  for (const Strategy strategy : kSaved) {
    for (const Strategy before : kSaved) {
      for (int ranks_before = 1; ranks_before <= 4; ++ranks_before) {
        SCOPED_TRACE(parallel::to_string(before) + " of " + std::to_string(ranks_before) + " to " +
                     parallel::to_string(strategy) + " of " + std::to_string(group.size()));
        auto model = make_model();
        Updater updater(model, group, options_of(strategy));
        train::load_shards(folder.of(before, ranks_before), updater.parts(), group);
        updater.set_num_updates(kSavedAt);
        train(updater, group, kSavedAt + 1, kLoadedTo);
        undisturbed.expect_equal(model, updater);
      }
    }
  }
}

// 4 strategies by 4 numbers of ranks, each to each: 256 ways to resume.
TEST(ReshardTest, EveryStrategyAndNumberOfRanksGoesOnFromEveryOthers) {
  const JobsFolder folder;
  const char* phase = std::getenv("COHORT_TEST_PHASE");
  for (const std::string each : {"save", "load"}) {
    if (phase != nullptr && phase != each) continue;  // a rank comes to its own job's call
    setenv("COHORT_TEST_PHASE", each.c_str(), 1);
    for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
      test::ranks(num_ranks, [&](const comm::ProcessGroup& group) {
        each == "save" ? save_with_every_strategy(group, folder)
                       : go_on_from_every_checkpoint(group, folder);
      });
    }
  }
  unsetenv("COHORT_TEST_PHASE");
}

}  // namespace strategies_test
}  // namespace cohort::translate
