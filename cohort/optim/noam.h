// SPDX-License-Identifier: Apache-2.0
// The learning-rate schedule of the Transformer paper.
#pragma once
#include <cstdint>

namespace cohort::optim {

/// factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5): linear rise, then inverse square root.
struct NoamSchedule {
  double factor = 1;
  int64_t width = 512;    ///< d_model, > 0.
  int64_t warmup = 4000;  ///< Steps of rise, > 0.

  /// The rate of update number `step`, counted from 1.
  /// Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
  double at(int64_t step) const;
};

}  // namespace cohort::optim
