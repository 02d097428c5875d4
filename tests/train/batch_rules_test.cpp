// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/batch_rules.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"

namespace cohort::train {
namespace batch_rules_test {

TEST(BatchRulesTest, GlobalBatchIsSharedOrBothNumbersAreNamed) {
  EXPECT_EQ(local_batch(256, 4), 64);
  EXPECT_EQ(effective_batch(64, 4), 256);
  EXPECT_EQ(effective_batch(8, 3, 2), 48);
  try {
    local_batch(256, 3);
    FAIL() << "256 examples on 3 ranks were accepted";
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error), "batch of 256 examples on 3 ranks: expected a multiple of 3");
  }
  EXPECT_THROW(local_batch(0, 1), ConfigError);
}

TEST(BatchRulesTest, LearningRateFollowsTheRule) {
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.1, 256, 1024, LearningRateRule::kNone), 0.1);
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.1, 256, 1024, LearningRateRule::kLinear), 0.4);
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.1, 256, 1024, LearningRateRule::kSquareRoot), 0.2);
  EXPECT_EQ(describe_learning_rate(0.1, 256, 512, LearningRateRule::kLinear),
            "0.1 x 512 / 256 = 0.2 (linear)");
  EXPECT_EQ(describe_learning_rate(0.1, 256, 1024, parse_learning_rate_rule("sqrt")),
            "0.1 x sqrt(1024 / 256) = 0.2 (sqrt)");
  EXPECT_THROW(parse_learning_rate_rule("cubic"), ConfigError);
  EXPECT_THROW(scaled_learning_rate(0.1, 0, 1, LearningRateRule::kLinear), ConfigError);
}

}  // namespace batch_rules_test
}  // namespace cohort::train
