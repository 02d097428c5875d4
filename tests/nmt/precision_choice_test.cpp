// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/nmt/options.h"

namespace cohort::nmt {
namespace precision_choice_test {

TEST(PrecisionChoiceTest, FollowsFromWhatIsMeasured) {
  const PrecisionChoice& choice = precision_choice();
  if (!multiplies_bfloat16()) {
    EXPECT_EQ(choice.precision, Precision::kFloat32);
    EXPECT_EQ(choice.bfloat16_flop_per_s, 0);
    return;
  }
  EXPECT_GT(choice.float32_flop_per_s, 0);
  EXPECT_EQ(choice.precision == Precision::kBFloat16,
            choice.bfloat16_flop_per_s >= kWorthwhileGain * choice.float32_flop_per_s);
  EXPECT_EQ(best_precision(), choice.precision);
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
