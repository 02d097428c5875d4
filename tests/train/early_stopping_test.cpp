// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/early_stopping.h"

#include <gtest/gtest.h>
#include <limits>

#include "cohort/base/error.h"

namespace cohort::train {
namespace early_stopping_test {

TEST(EarlyStoppingTest, StopsAfterPatienceUpdatesWithoutANewBest) {
  EarlyStopping stopping({.patience = 2});
  EXPECT_TRUE(stopping.update(3.0));
  EXPECT_FALSE(stopping.update(3.0));  // Equal is not better.
  EXPECT_FALSE(stopping.should_stop());
  EXPECT_TRUE(stopping.update(2.0));
  EXPECT_FALSE(stopping.update(2.5));
  EXPECT_FALSE(stopping.should_stop());
  EXPECT_FALSE(stopping.update(2.4));
  EXPECT_TRUE(stopping.should_stop());
  EXPECT_EQ(stopping.state().best, 2.0);
}

TEST(EarlyStoppingTest, HigherCanBeBetterAndSmallGainsMayNotCount) {
  EarlyStopping stopping({.patience = 1, .better = Better::kHigher, .min_delta = 0.5});
  EXPECT_TRUE(stopping.update(-10.0));
  EXPECT_TRUE(stopping.update(20.0));
  EXPECT_FALSE(stopping.update(20.5));
  EXPECT_TRUE(stopping.should_stop());
}

TEST(EarlyStoppingTest, NanIsNeverBest) {
  EarlyStopping stopping({.patience = 1});
  EXPECT_FALSE(stopping.update(std::numeric_limits<double>::quiet_NaN()));
  EXPECT_TRUE(stopping.should_stop());
  EXPECT_TRUE(stopping.update(1.0));
  EXPECT_FALSE(stopping.should_stop());
}

TEST(EarlyStoppingTest, WithoutPatienceItNeverStops) {
  EarlyStopping stopping({});
  for (int i = 0; i < 100; ++i) stopping.update(i);
  EXPECT_FALSE(stopping.should_stop());
}

TEST(EarlyStoppingTest, ContinuesFromAState) {
  EarlyStopping first({.patience = 2});
  first.update(1.0);
  first.update(2.0);
  EarlyStopping resumed({.patience = 2}, first.state());
  EXPECT_FALSE(resumed.update(1.5));
  EXPECT_TRUE(resumed.should_stop());
}

TEST(EarlyStoppingTest, RefusesBadOptions) {
  EXPECT_THROW(EarlyStopping({.patience = -1}), ConfigError);
  EXPECT_THROW(EarlyStopping({.min_delta = -0.1}), ConfigError);
}

}  // namespace early_stopping_test
}  // namespace cohort::train
