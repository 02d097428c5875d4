// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/pages.h"

#include <algorithm>
#include <cstddef>
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

TEST(PagesTest, CollapseKeepsWhatIsThereAndLeavesWhatIsNot) {
  constexpr size_t kBytes = 4 * kHugePage;
  const Pages pages(kBytes);
  std::memset(pages.data(), 7, kBytes / 2);
  const int64_t before = test::process_memory().resident;
  collapse({pages.data(), kBytes});
  collapse({});
  EXPECT_LT(test::process_memory().resident - before, int64_t{kHugePage})
      << "it takes no memory for what was not written";
  EXPECT_EQ(std::count(pages.data(), pages.data() + kBytes / 2, std::byte{7}), kBytes / 2);
  EXPECT_EQ(std::count(pages.data() + kBytes / 2, pages.data() + kBytes, std::byte{0}), kBytes / 2);
}

}  // namespace pages_test
}  // namespace cohort::ps
