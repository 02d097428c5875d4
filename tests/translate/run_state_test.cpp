// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_state.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace run_state_test {

TEST(RunStateTest, RoundTripsToTheLastBit) {
  RunState state{
      .epoch = 3,
      .trained = {{{.mini_batch = 7, .seed = ~uint64_t{0}, .world_size = 2}, 11},
                  {{.mini_batch_words = 900, .fit_rows = {9, 4}, .maxi_batch = 3, .world_size = 3},
                   0}},
      .updates = int64_t{1} << 53,
      .loss_sum = 1.0 / 3,
      .token_sum = 12,
      .train_seconds = 0.1,
      .seconds = 1e9 / 7,
      .early_stopping = {.best = 2.0 / 3, .num_without_best = 4},
      .best = ValidScores{.loss = 1e-300, .bleu = 22.5, .chrf = 1.0 / 3},
      .best_update = 77,
      .fit_rows = {30, 20, 20},
      .fitted_for = "workspace \"2\""};
  train::Metadata metadata{{"other", "kept"}};
  write_metadata(state, metadata);
  const RunState found = read_state(metadata);
  EXPECT_EQ(found.epoch, state.epoch);
  ASSERT_EQ(found.trained.size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found.trained[i].options, state.trained[i].options);
    EXPECT_EQ(found.trained[i].num_batches, state.trained[i].num_batches);
  }
  EXPECT_EQ(found.updates, state.updates);
  EXPECT_EQ(found.loss_sum, state.loss_sum);
  EXPECT_EQ(found.token_sum, state.token_sum);
  EXPECT_EQ(found.train_seconds, state.train_seconds);
  EXPECT_EQ(found.seconds, state.seconds);
  EXPECT_EQ(found.early_stopping.best, state.early_stopping.best);
  EXPECT_EQ(found.early_stopping.num_without_best, 4);
  EXPECT_EQ(found.best, state.best);
  EXPECT_EQ(found.best_update, 77);
  EXPECT_EQ(found.fit_rows, state.fit_rows);
  EXPECT_EQ(found.fitted_for, state.fitted_for);
  EXPECT_EQ(metadata["other"], "kept");

  metadata.erase("seconds");
  EXPECT_THROW(read_state(metadata), ConfigError);
  metadata["seconds"] = "soon";
  EXPECT_THROW(read_state(metadata), ConfigError);
}

TEST(RunStateTest, WhatWasNotScoredIsNotThere) {
  train::Metadata metadata;
  write_metadata({}, metadata);
  EXPECT_FALSE(read_state(metadata).best);
  EXPECT_FALSE(read_state(metadata).is_validated());
  write_metadata({.early_stopping = {.best = 3.0}, .best = ValidScores{.loss = 3}}, metadata);
  const RunState found = read_state(metadata);
  EXPECT_EQ(found.best, (ValidScores{.loss = 3}));
  EXPECT_FALSE(metadata.contains("best_bleu"));
  EXPECT_TRUE(found.is_validated());
  write_metadata({.token_sum = 1, .early_stopping = {.best = 3.0}}, metadata);
  EXPECT_FALSE(read_state(metadata).is_validated()) << "something was trained since";
}

}  // namespace run_state_test
}  // namespace cohort::translate
