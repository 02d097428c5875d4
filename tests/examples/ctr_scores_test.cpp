// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <cmath>
#include <gtest/gtest.h>

#include "cohort/data/random.h"

#include "examples/ctr/scores.h"

namespace ctr {
namespace ctr_scores_test {

// Scores on a coarse grid, so that many tie.
void draw(uint64_t seed, size_t count, int grid, std::vector<float>& scores,
          std::vector<float>& labels) {
  cohort::data::SplitMix64 random(seed);
  for (size_t i = 0; i < count; ++i) {
    scores.push_back(static_cast<float>(random.below(static_cast<uint64_t>(grid))) / 8 - 2);
    labels.push_back(random.below(3) == 0 ? 1 : 0);
  }
}

ScoreSet set_of(const std::vector<float>& scores, const std::vector<float>& labels) {
  ScoreSet set;
  set.add(scores, labels);
  return set;
}

double quadratic_auc(const std::vector<float>& scores, const std::vector<float>& labels) {
  double ordered = 0;
  double pairs = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    for (size_t j = 0; j < scores.size(); ++j) {
      if (labels[i] == 0 || labels[j] == 1) continue;
      ++pairs;
      ordered += scores[i] > scores[j] ? 1 : scores[i] == scores[j] ? 0.5 : 0;
    }
  }
  return ordered / pairs;
}

TEST(ScoreSetTest, AucIsTheShareOfOrderedPairs) {
  for (const int grid : {1, 2, 10, 1000}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      std::vector<float> scores, labels;
      draw(seed, 200, grid, scores, labels);
      EXPECT_DOUBLE_EQ(set_of(scores, labels).metrics().auc, quadratic_auc(scores, labels))
          << grid << " " << seed;
    }
  }
}

TEST(ScoreSetTest, LogLossAndMeanPredictionAreTheirFormulas) {
  std::vector<float> scores, labels;
  draw(1, 300, 64, scores, labels);
  double loss = 0;
  double mean = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const double p = 1 / (1 + std::exp(-static_cast<double>(scores[i])));
    loss -= labels[i] > 0 ? std::log(p) : std::log(1 - p);
    mean += p;
  }
  const Metrics metrics = set_of(scores, labels).metrics();
  EXPECT_EQ(metrics.count, 300);
  EXPECT_NEAR(metrics.log_loss, loss / 300, 1e-12);
  EXPECT_NEAR(metrics.mean_prediction, mean / 300, 1e-12);
  // Far out, where 1 - p would be 0.
  EXPECT_NEAR(set_of({100}, {0}).metrics().log_loss, 100, 1e-9);
  EXPECT_NEAR(set_of({-1000}, {1}).metrics().log_loss, 1000, 1e-9);
}

TEST(ScoreSetTest, EveryWayOfSharingOutGivesTheSameBits) {
  std::vector<float> scores, labels;
  draw(2, 1000, 500, scores, labels);
  const Metrics whole = set_of(scores, labels).metrics();
  for (const size_t shares : {2u, 3u, 7u}) {
    ScoreSet merged;
    for (size_t share = shares; share-- > 0;) {
      std::vector<float> part, part_labels;
      for (size_t i = share; i < scores.size(); i += shares) {
        part.push_back(scores[i]);
        part_labels.push_back(labels[i]);
      }
      merged.merge(ScoreSet::from_bytes(set_of(part, part_labels).to_bytes()));
    }
    const Metrics metrics = merged.metrics();
    EXPECT_EQ(metrics.count, whole.count);
    EXPECT_EQ(metrics.clicks, whole.clicks);
    EXPECT_EQ(metrics.auc, whole.auc);
    EXPECT_EQ(metrics.log_loss, whole.log_loss);
    EXPECT_EQ(metrics.mean_prediction, whole.mean_prediction);
  }
}

TEST(ScoreSetTest, WhatIsNotDefinedIsNotANumber) {
  EXPECT_TRUE(std::isnan(ScoreSet().metrics().auc));
  EXPECT_TRUE(std::isnan(ScoreSet().metrics().log_loss));
  EXPECT_TRUE(std::isnan(set_of({1, 2}, {1, 1}).metrics().auc));
  EXPECT_EQ(ScoreSet::from_bytes(ScoreSet().to_bytes()).metrics().count, 0);
}

TEST(ScoreSetTest, BadInputIsRefused) {
  EXPECT_THROW(set_of({1}, {}), c10::ValueError);
  EXPECT_THROW(set_of({std::nanf("")}, {1}), c10::ValueError);
  EXPECT_THROW(ScoreSet::from_bytes("abc"), c10::ValueError);
  EXPECT_THROW(ScoreSet::from_bytes(std::string(8, '\1')), c10::ValueError);
}

}  // namespace ctr_scores_test
}  // namespace ctr
