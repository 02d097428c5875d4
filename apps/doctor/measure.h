// SPDX-License-Identifier: Apache-2.0
// How fast two processes of this machine sum a tensor.
#pragma once
#include <cstdint>

#include "cohort/comm/process_group.h"

namespace cohort::cli {

struct AllReduceRate {
  int64_t bytes = 0;            ///< Of the large tensor: one of DDP's buckets.
  double bytes_per_second = 0;  ///< `bytes` by the time of its sum.
  double latency_s = 0;         ///< Of the sum of 4 bytes.
};

/// Medians of some all-reduces. Collective; blocks.
AllReduceRate measure_all_reduce(const comm::ProcessGroup& group);

}  // namespace cohort::cli
