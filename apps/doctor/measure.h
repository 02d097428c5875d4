// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies matrices and how fast two of its processes sum a tensor.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <cstdint>

#include "cohort/comm/process_group.h"

namespace cohort::cli {

/// Returns FLOP/s of products [256 threads, 512] x [512, 2048], the median over about `budget`;
/// leaves the number of threads as it was. `type` is what is multiplied.
double measure_products(at::ScalarType type, int threads, std::chrono::milliseconds budget);

struct AllReduceRate {
  int64_t bytes = 0;            ///< Of the large tensor: one of DDP's buckets.
  double bytes_per_second = 0;  ///< `bytes` by the time of its sum.
  double latency_s = 0;         ///< Of the sum of 4 bytes.
};

/// Medians of some all-reduces. Collective; blocks.
AllReduceRate measure_all_reduce(const comm::ProcessGroup& group);

}  // namespace cohort::cli
