// SPDX-License-Identifier: Apache-2.0
// What the ranks of a run exchange with each update, as one vector of numbers to be summed.
#pragma once
#include <span>
#include <vector>

namespace cohort::translate {

/// One rank's part, or the sum over ranks: a flag of the sum holds if any rank's does.
struct StepVotes {
  double loss_sum = 0;  ///< Over target tokens.
  double tokens = 0;    ///< Target tokens.
  bool time_is_up = false;
  bool is_asked_to_stop = false;  ///< By a signal.
  bool is_save_due = false;
  bool is_writing = false;  ///< An earlier save.
  /// By rank along the data axes: target tokens per second. A rank fills in its own, the others
  /// are 0.
  std::vector<double> rank_tokens_per_s;
  std::vector<double> rank_losses;  ///< Likewise, as many: mean over its target tokens.

  /// Returns 6 + 2 * rank_tokens_per_s.size() numbers, whose sums over ranks `unpack` reads.
  std::vector<double> pack() const;
  static StepVotes unpack(std::span<const double> sums);
};

}  // namespace cohort::translate
