// SPDX-License-Identifier: Apache-2.0
#include "apps/doctor/measure.h"

#include <ATen/Parallel.h>
#include <algorithm>
#include <torch/types.h>
#include <vector>

namespace cohort::cli {
namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

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
  return median(seconds);
}

}  // namespace

double measure_products(at::ScalarType type, int threads, std::chrono::milliseconds budget) {
  const at::NoGradGuard no_grad;
  const int before = at::get_num_threads();
  at::set_num_threads(threads);
  const int64_t rows = 256 * int64_t{threads}, inner = 512, columns = 2048;
  const at::Tensor a = at::randn({rows, inner}).to(type);
  const at::Tensor b = at::randn({columns, inner}).to(type);
  at::Tensor c = at::mm(a, b.t());
  std::vector<double> seconds;
  const auto end = Clock::now() + budget;
  do {
    seconds.push_back(seconds_of([&] { at::mm_out(c, a, b.t()); }));
  } while (Clock::now() < end);
  at::set_num_threads(before);
  return 2.0 * static_cast<double>(rows * inner * columns) / median(seconds);
}

AllReduceRate measure_all_reduce(const comm::ProcessGroup& group) {
  constexpr int64_t kElements = 25 << 18;  // 25 MiB of float32
  const double bytes = 4.0 * kElements;
  const double seconds = seconds_of_sum(group, kElements, 5);
  return {.bytes = 4 * kElements,
          .bytes_per_second = bytes / seconds,
          .latency_s = seconds_of_sum(group, 1, 51)};
}

}  // namespace cohort::cli
