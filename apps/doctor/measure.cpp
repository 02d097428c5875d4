// SPDX-License-Identifier: Apache-2.0
#include "apps/doctor/measure.h"

#include <chrono>
#include <torch/types.h>
#include <vector>

#include "bench/median.h"

namespace cohort::cli {
namespace {

using Clock = std::chrono::steady_clock;

template <class Work>
double seconds_of(Work work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double seconds_of_sum(const comm::ProcessGroup& group, int64_t elements, int times) {
  at::Tensor tensor = at::ones({elements}, at::kFloat);
  group.all_reduce(tensor);
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) seconds.push_back(seconds_of([&] { group.all_reduce(tensor); }));
  return bench::median_of(seconds);
}

}  // namespace

AllReduceRate measure_all_reduce(const comm::ProcessGroup& group) {
  constexpr int64_t kElements = 25 << 18;  // 25 MiB of float32
  const double bytes = 4.0 * kElements;
  const double seconds = seconds_of_sum(group, kElements, 5);
  return {.bytes = 4 * kElements,
          .bytes_per_second = bytes / seconds,
          .latency_s = seconds_of_sum(group, 1, 51)};
}

}  // namespace cohort::cli
