// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/step_votes.h"

#include <gtest/gtest.h>

namespace cohort::translate {
namespace step_votes_test {

std::vector<double> sum(const StepVotes& first, const StepVotes& second) {
  std::vector<double> sums = first.pack();
  const std::vector<double> others = second.pack();
  EXPECT_EQ(sums.size(), others.size());
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += others[i];
  return sums;
}

TEST(StepVotesTest, NumbersAreSummedOverRanks) {
  const StepVotes all = StepVotes::unpack(
      sum({.loss_sum = 1.5, .tokens = 3, .rank_tokens_per_s = {7, 0}, .rank_losses = {0.5, 0}},
          {.loss_sum = 2, .tokens = 5, .rank_tokens_per_s = {0, 9}, .rank_losses = {0, 0.4}}));
  EXPECT_EQ(all.loss_sum, 3.5);
  EXPECT_EQ(all.tokens, 8);
  EXPECT_EQ(all.rank_tokens_per_s, (std::vector<double>{7, 9}));
  EXPECT_EQ(all.rank_losses, (std::vector<double>{0.5, 0.4}));
}

// Each flag by itself, of either rank or of both, and no other with it.
TEST(StepVotesTest, AFlagHoldsIfAnyRanksDoes) {
  const std::vector<bool StepVotes::*> flags = {&StepVotes::time_is_up,
                                                &StepVotes::is_asked_to_stop,
                                                &StepVotes::is_save_due, &StepVotes::is_writing};
  for (size_t set = 0; set < flags.size(); ++set) {
    StepVotes yes;
    yes.*flags[set] = true;
    for (const auto& sums : {sum(yes, {}), sum({}, yes), sum(yes, yes)}) {
      const StepVotes all = StepVotes::unpack(sums);
      for (size_t i = 0; i < flags.size(); ++i) EXPECT_EQ(all.*flags[i], i == set) << i << set;
    }
  }
}

}  // namespace step_votes_test
}  // namespace cohort::translate
