// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/noam.h"

#include <algorithm>
#include <cmath>

namespace cohort::optim {

double NoamSchedule::at(int64_t step) const {
  const auto s = static_cast<double>(std::max<int64_t>(step, 1));
  const auto w = static_cast<double>(warmup);
  return factor / std::sqrt(static_cast<double>(width)) *
         std::min(1 / std::sqrt(s), s / (w * std::sqrt(w)));
}

}  // namespace cohort::optim
