// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/pages.h"

#include <cstring>
#include <gtest/gtest.h>

#include "tests/support/resident.h"

namespace cohort::ps {
namespace pages_test {

// What is mapped for the alignment to huge pages goes back at once.
TEST(PagesTest, MapsWhatItIsAskedForAndGivesItBack) {
  constexpr int64_t kMiB = 1 << 20;
  constexpr int64_t kSlack = kMiB / 4;  // What else the process maps meanwhile.
  for (const int64_t bytes : {kMiB, 8 * kMiB, 8 * kMiB + 4096}) {
    const int64_t before = test::process_memory().mapped;
    {
      const Pages pages(static_cast<size_t>(bytes));
      EXPECT_NEAR(test::process_memory().mapped - before, bytes, kSlack);
      std::memset(pages.data(), 1, static_cast<size_t>(bytes));
    }
    EXPECT_NEAR(test::process_memory().mapped, before, kSlack);
  }
}

}  // namespace pages_test
}  // namespace cohort::ps
