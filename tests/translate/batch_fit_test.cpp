// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/batch_fit.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/data/token_batches.h"
#include "cohort/translate/layer_runner.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::translate {
namespace batch_fit_test {

constexpr int64_t kMiB = int64_t{1} << 20;

nmt::Transformer small_model() {
  nmt::Transformer model(nmt::TransformerOptions{.dim_vocab_source = 200,
                                                 .dim_vocab_target = 300,
                                                 .dim_emb = 32,
                                                 .heads = 4,
                                                 .enc_depth = 2,
                                                 .dec_depth = 2,
                                                 .dim_ffn = 64,
                                                 .max_positions = 200});
  model->initialise(1);
  model->train();
  return model;
}

TEST(BatchFitTest, EveryLengthsBatchFitsAndTriedOnesFillTheWorkspace) {
  auto model = small_model();
  comm::ProcessGroup alone(comm::RankInfo{});
  const BatchFitOptions options{
      .workspace_bytes = 16 * kMiB, .longest = 75, .most_rows = 1'000'000};
  const BatchFit fit = fit_batches(model, options, alone);
  ASSERT_EQ(fit.rows.size(), 8);
  for (size_t i = 0; i < fit.rows.size(); ++i) {
    const int64_t width = (static_cast<int64_t>(i) + 1) * data::kFitStep;
    EXPECT_LE(batch_bytes(model, fit.rows[i], width), options.workspace_bytes) << width;
    EXPECT_TRUE(i == 0 || fit.rows[i] <= fit.rows[i - 1]);
  }
  ASSERT_EQ(fit.trials.size(), 3);
  for (const auto& trial : fit.trials) {
    const int64_t bytes = batch_bytes(model, trial.rows, trial.width);
    EXPECT_LE(bytes, trial.peak_bytes) << trial.width;
    EXPECT_LE(trial.peak_bytes, options.workspace_bytes) << trial.width;
    EXPECT_GT(bytes * 10, options.workspace_bytes * 8) << trial.width;
    // Small batches tell enough; the one that is run as it will be is that of the longest.
    const bool is_longest = trial.width == fit.trials.back().width;
    EXPECT_LE(trial.rows_run, trial.rows * (is_longest ? 2 : 1)) << trial.width;
  }
  EXPECT_EQ(fit.trials.back().width, 80);
  for (const auto& parameter : model->parameters())
    EXPECT_FALSE(parameter.grad().defined()) << "nothing is left behind";
}

TEST(BatchFitTest, MemoryIsThatOfATrainingStep) {
  auto model = small_model();
  const int64_t one = batch_bytes(model, 8, 40);
  EXPECT_EQ(batch_bytes(model, 8, 40), one) << "the same every time, so a run resumes exactly";
  const int64_t more = batch_bytes(model, 32, 40);
  // Logits alone: 32 x 40 x 300 floats, and as much again for their gradient.
  EXPECT_GT(more, 2 * 32 * 40 * 300 * 4);
  EXPECT_NEAR(static_cast<double>(more) / static_cast<double>(one), 4, 0.5);
}

TEST(BatchFitTest, NoMoreRowsThanThereArePairs) {
  auto model = small_model();
  comm::ProcessGroup alone(comm::RankInfo{});
  const BatchFit fit =
      fit_batches(model, {.workspace_bytes = 64 * kMiB, .longest = 9, .most_rows = 50}, alone);
  for (const auto& trial : fit.trials) EXPECT_LE(trial.rows, 50);
}

TEST(BatchFitTest, TooSmallAWorkspaceIsRefusedWithWhatIsNeeded) {
  auto model = small_model();
  comm::ProcessGroup alone(comm::RankInfo{});
  const std::string error = test::message_of<ConfigError>([&] {
    fit_batches(model, {.workspace_bytes = 1000, .longest = 150, .most_rows = 50}, alone);
  });
  EXPECT_EQ(error.find("--workspace 0: one pair of 10 tokens needs more: expected at least 1"), 0)
      << error;
}

TEST(BatchFitTest, RanksAgree) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    auto model = small_model();
    // A rank with less room: all take what it can.
    const BatchFit fit = fit_batches(model,
                                     {.workspace_bytes = (group.rank() == 0 ? 16 : 8) * kMiB,
                                      .longest = 30,
                                      .most_rows = 100'000},
                                     group);
    std::string rows;
    for (const int64_t n : fit.rows) rows += std::to_string(n) + " ";
    EXPECT_EQ(group.broadcast_object(rows), rows);
  });
}

// Each rank holds half of the parameters: layers are gathered for the trials as for training.
TEST(BatchFitTest, BatchesOfAShardedModelAreFittedWithWhatItGathers) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    auto model = small_model();
    set_up_layers(model, /*gradient_checkpointing=*/false);
    parallel::ParallelModel<nmt::Transformer> sharded(
        model, group, {.strategy = parallel::Strategy::kZero3}, model->layers());
    const BatchFitOptions options{.workspace_bytes = 8 * kMiB,
                                  .longest = 30,
                                  .most_rows = 1'000'000,
                                  .tensor_group = group,
                                  .sharded = &sharded};
    const BatchFit fit = fit_batches(model, options, group);
    ASSERT_EQ(fit.rows.size(), 3);
    for (size_t i = 0; i < fit.rows.size(); ++i) {
      const int64_t width = (static_cast<int64_t>(i) + 1) * data::kFitStep;
      const int64_t bytes = batch_bytes(model, fit.rows[i], width, options);
      EXPECT_LE(bytes, options.workspace_bytes) << width;
      EXPECT_GT(bytes * 10, options.workspace_bytes * 7) << width;
    }
    for (const auto& shard : sharded.local_shards()) EXPECT_FALSE(shard.tensor.grad().defined());

    // A row of one token takes next to nothing: what is left is what the ranks exchange.
    auto whole = small_model();
    EXPECT_GT(batch_bytes(model, 1, 1, options), batch_bytes(whole, 1, 1) + 4 * 300 * 32 / 2)
        << "the tables, of which a rank holds half, are whole in forward and backward";
  });
}

}  // namespace batch_fit_test
}  // namespace cohort::translate
