// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/precision.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::translate {
namespace precision_test {

TEST(PrecisionTest, RanksThatDifferAreNamedOnAllOfThem) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto agreed = [&](nmt::Precision first, nmt::Precision second) {
      return agreed_precision(group.rank() == 0 ? first : second, group);
    };
    constexpr auto kBFloat16 = nmt::Precision::kBFloat16;
    EXPECT_EQ(agreed(kBFloat16, kBFloat16), kBFloat16);
    EXPECT_EQ(agreed_precision(std::nullopt, group), nmt::best_precision(/*on_cpu=*/true));
    EXPECT_EQ(test::message_of<ConfigError>([&] { agreed(kBFloat16, nmt::Precision::kFloat32); }),
              "--precision: expected the same on all ranks, got bfloat16 on rank 0 and float32 on "
              "rank 1");
  });
}

TEST(PrecisionTest, ProcessorsThatSuitDifferentOnesComputeInFloat32) {
  constexpr auto kFloat32 = nmt::Precision::kFloat32, kBFloat16 = nmt::Precision::kBFloat16;
  EXPECT_EQ(common_precision({kBFloat16, kBFloat16}), kBFloat16);
  EXPECT_EQ(common_precision({kBFloat16, kFloat32}), kFloat32);
  EXPECT_EQ(common_precision({kFloat32, kBFloat16}), kFloat32);
}

}  // namespace precision_test
}  // namespace cohort::translate
