// SPDX-License-Identifier: Apache-2.0
// How fast this CPU multiplies matrices. A header alone, for programs without the translator have it, too.
#pragma once
#include <ATen/Parallel.h>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <torch/types.h>
#include <vector>

namespace cohort::nmt {

/// Sets libtorch's number of threads while it lives.
class NumThreads {
 public:
  explicit NumThreads(int threads) : before_(at::get_num_threads()) {
    at::set_num_threads(threads);
  }
  ~NumThreads() { at::set_num_threads(before_); }
  NumThreads(const NumThreads&) = delete;
  NumThreads& operator=(const NumThreads&) = delete;

 private:
  int before_;
};

/// out = a b
using Multiply = void (*)(const at::Tensor& a, const at::Tensor& b, at::Tensor& out);
inline void multiply_by_libtorch(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  at::mm_out(out, a, b);
}

/// A product as training makes them: of one type.
class TimedProduct {
 public:
  /// [256 threads, 512] x [512, columns].
  TimedProduct(at::ScalarType type, int threads, int64_t columns, Multiply multiply)
      : threads_(threads),
        multiply_(multiply),
        x_(at::ones({256 * int64_t{threads}, 512}, type)),
        weight_(at::ones({columns, 512}, type)),
        out_(at::empty({x_.size(0), columns}, type)) {
    multiply_(x_, weight_.t(), out_);  // The first one makes the kernel.
  }
  void run() {
    const double start = now();
    multiply_(x_, weight_.t(), out_);
    seconds_.push_back(now() - start);
  }
  /// The median's. After run().
  double flop_per_s() const {
    std::vector<double> sorted = seconds_;
    std::ranges::sort(sorted);
    return 2.0 * static_cast<double>(out_.numel() * x_.size(1)) / sorted[sorted.size() / 2];
  }

 private:
  // Of one thread CPU time, so that other processes on the core do not count.
  double now() const {
    timespec time{};
    clock_gettime(threads_ == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  int threads_;
  Multiply multiply_;
  at::Tensor x_, weight_, out_;
  std::vector<double> seconds_;
};

struct ProductRates {
  double float32_flop_per_s = 0, bfloat16_flop_per_s = 0;
};

/// Medians of five products of both types or more, until `budget` is over. Leaves the number of threads as it was, also if it throws;
/// draws no random numbers.
inline ProductRates measure_products(int threads, int64_t columns, std::chrono::milliseconds budget,
                                     Multiply multiply = multiply_by_libtorch) {
  const at::NoGradGuard no_grad;
  const NumThreads set(threads);
  TimedProduct float32(at::kFloat, threads, columns, multiply),
      bfloat16(at::kBFloat16, threads, columns, multiply);
  const auto end = std::chrono::steady_clock::now() + budget;
  for (int i = 0; i < 5 || std::chrono::steady_clock::now() < end; ++i) {
    float32.run();  // In turn: the clock's changes meet both.
    bfloat16.run();
  }
  return {float32.flop_per_s(), bfloat16.flop_per_s()};
}

}  // namespace cohort::nmt
