// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/number_hash.h"

#include <gtest/gtest.h>

namespace cohort::comm {
namespace number_hash_test {

// Of the definition of FNV-1a, computed apart from this code.
TEST(NumberHashTest, ItsValuesStay) {
  EXPECT_EQ(NumberHash().value(), 0x4fd0bfc1U);
  EXPECT_EQ(NumberHash().add(1).add(-1).add(int64_t{1} << 40).value(), 0xb78f5e2cU);
  EXPECT_EQ(NumberHash(12345).add(6).value(), 0x2ab5c762U);
}

TEST(NumberHashTest, ATagIsNeverNegative) {
  for (int64_t number = 0; number < 1000; ++number) {
    const NumberHash hash = NumberHash().add(number);
    EXPECT_EQ(static_cast<uint32_t>(hash.tag()), hash.value() & 0x7fffffffU);
  }
}

}  // namespace number_hash_test
}  // namespace cohort::comm
