// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/step_votes.h"

namespace cohort::translate {

std::vector<double> StepVotes::pack() const {
  std::vector<double> packed = {loss_sum,
                                tokens,
                                time_is_up ? 1. : 0.,
                                is_asked_to_stop ? 1. : 0.,
                                is_save_due ? 1. : 0.,
                                is_writing ? 1. : 0.};
  packed.insert(packed.end(), rank_tokens_per_s.begin(), rank_tokens_per_s.end());
  packed.insert(packed.end(), rank_losses.begin(), rank_losses.end());
  return packed;
}

StepVotes StepVotes::unpack(std::span<const double> sums) {
  const auto losses = sums.begin() + 6 + (std::ssize(sums) - 6) / 2;
  return {.loss_sum = sums[0],
          .tokens = sums[1],
          .time_is_up = sums[2] > 0,
          .is_asked_to_stop = sums[3] > 0,
          .is_save_due = sums[4] > 0,
          .is_writing = sums[5] > 0,
          .rank_tokens_per_s = {sums.begin() + 6, losses},
          .rank_losses = {losses, sums.end()}};
}

}  // namespace cohort::translate
