// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <chrono>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/nmt/options.h"
#include "cohort/nmt/product_rates.h"

namespace cohort::nmt {
namespace precision_choice_test {

TEST(PrecisionChoiceTest, BFloat16IsWorthAFifthMore) {
  EXPECT_EQ(faster_precision(100, 60), Precision::kFloat32);
  EXPECT_EQ(faster_precision(100, 119), Precision::kFloat32);
  EXPECT_EQ(faster_precision(100, 121), Precision::kBFloat16);
  EXPECT_EQ(faster_precision(1e11, 0), Precision::kFloat32);
}

TEST(PrecisionChoiceTest, IsOfWhatTheProcessorMultiplies) {
  const PrecisionChoice& choice = precision_choice();
  EXPECT_EQ(choice.float32_flop_per_s > 0, multiplies_bfloat16());
  EXPECT_EQ(choice.bfloat16_flop_per_s > 0, multiplies_bfloat16());
  if (!multiplies_bfloat16()) {
    EXPECT_EQ(choice.precision, Precision::kFloat32);
  }
  EXPECT_EQ(best_precision(/*on_cpu=*/true), choice.precision);
}

TEST(PrecisionChoiceTest, OfAnotherDeviceItIsBFloat16WhateverTheProcessor) {
  EXPECT_EQ(best_precision(/*on_cpu=*/false), Precision::kBFloat16);
}

// Alone in its process, as ctest runs it: this is the first call.
TEST(PrecisionChoiceTest, LeavesThreadsAndRandomNumbersAlone) {
  const int threads = at::get_num_threads();
  torch::manual_seed(1);
  const at::Tensor expected = at::rand({4});
  torch::manual_seed(1);
  precision_choice();
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
  EXPECT_EQ(at::get_num_threads(), threads);
}

TEST(PrecisionChoiceTest, AProductThatThrowsLeavesTheThreadsAlone) {
  const NumThreads two(2);
  EXPECT_ANY_THROW(measure_products(/*threads=*/1, /*columns=*/-1, std::chrono::milliseconds(0)));
  EXPECT_EQ(at::get_num_threads(), 2);
}

TEST(PrecisionChoiceTest, APrecisionThatIsNamedNeedsTheInstructionsAlone) {
  EXPECT_NO_THROW(check_precision(Precision::kFloat32, /*on_cpu=*/true));
  if (multiplies_bfloat16()) {
    EXPECT_NO_THROW(check_precision(Precision::kBFloat16, /*on_cpu=*/true));
  } else {
    EXPECT_ANY_THROW(check_precision(Precision::kBFloat16, /*on_cpu=*/true));
  }
}

}  // namespace precision_choice_test
}  // namespace cohort::nmt
