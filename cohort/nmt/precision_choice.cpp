// SPDX-License-Identifier: Apache-2.0
#include <chrono>

#include "cohort/nmt/kernels/kernels.h"
#include "cohort/nmt/options.h"
#include "cohort/nmt/product_rates.h"

namespace cohort::nmt {
namespace {

PrecisionChoice measure_precisions() {
  if (!multiplies_bfloat16()) return {};
  const auto multiply = [](const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
    kernels_for(a).product(a, b, {}, out);
  };
  const auto [float32, bfloat16] =
      measure_products(/*threads=*/1, /*columns=*/256, std::chrono::milliseconds(0), multiply);
  return {.precision = faster_precision(float32, bfloat16),
          .float32_flop_per_s = float32,
          .bfloat16_flop_per_s = bfloat16};
}

}  // namespace

const PrecisionChoice& precision_choice() {
  static const PrecisionChoice choice = measure_precisions();
  return choice;
}

}  // namespace cohort::nmt
