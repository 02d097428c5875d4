// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <algorithm>
#include <ctime>
#include <limits>
#include <torch/types.h>

#include "cohort/nmt/options.h"

namespace cohort::nmt {
namespace {

// CPU time, so that other processes on the core do not count.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A product as training makes them: of one type, by at::mm.
class TimedProduct {
 public:
  explicit TimedProduct(at::ScalarType type)
      : x_(at::ones({kRows, kInner}, type)),
        weight_(at::ones({kColumns, kInner}, type)),
        out_(at::mm(x_, weight_.t())) {}  // The first one makes the kernel.
  void run() {
    const double start = thread_seconds();
    at::mm_out(out_, x_, weight_.t());
    least_ = std::min(least_, thread_seconds() - start);
  }
  double flop_per_s() const { return 2.0 * kRows * kInner * kColumns / least_; }

 private:
  static constexpr int64_t kRows = 128, kInner = 512, kColumns = 512;
  at::Tensor x_, weight_, out_;
  double least_ = std::numeric_limits<double>::infinity();
};

PrecisionChoice measure_precisions() {
  if (!multiplies_bfloat16()) return {};
  const at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  TimedProduct float32(at::kFloat), bfloat16(at::kBFloat16);
  constexpr int kTries = 5;
  for (int i = 0; i < kTries; ++i) {  // In turn: the clock's changes meet both.
    float32.run();
    bfloat16.run();
  }
  at::set_num_threads(threads);
  const bool gains = bfloat16.flop_per_s() >= kWorthwhileGain * float32.flop_per_s();
  return {.precision = gains ? Precision::kBFloat16 : Precision::kFloat32,
          .float32_flop_per_s = float32.flop_per_s(),
          .bfloat16_flop_per_s = bfloat16.flop_per_s()};
}

}  // namespace

const PrecisionChoice& precision_choice() {
  static const PrecisionChoice choice = measure_precisions();
  return choice;
}

}  // namespace cohort::nmt
