// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/pages.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <utility>

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

// Whether the kernel gathers huge pages when it is asked to.
bool system_collapses() {
  const Pages pages(kHugePage);
  std::memset(pages.data(), 1, kHugePage);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  return test::huge_bytes() > 0 && ::madvise(pages.data(), kHugePage, kCollapse) == 0;
}

TEST(PagesTest, CollapseGathersWhatWasWritten) {
  const int64_t gathered = system_collapses() ? 2 * kHugePage : 0;
  Pages pages(4 * kHugePage, 4 * kHugePage);
  // The first two were never written: there is nothing to gather, and what follows is gathered.
  std::memset(pages.data() + 2 * kHugePage, 7, 2 * kHugePage);
  pages.make_huge();
  const int64_t before = test::huge_bytes();
  collapse({});
  // The kernel may find a page in use. Not for long: its own thread would gather it, too.
  for (int attempt = 0; attempt < 3 && test::huge_bytes() - before != gathered; ++attempt)
    collapse({pages.data(), pages.bytes()});
  EXPECT_EQ(test::huge_bytes() - before, gathered);
  EXPECT_EQ(test::resident_bytes({pages.data(), pages.bytes()}), 2 * int64_t{kHugePage});
  EXPECT_EQ(std::count(pages.data(), pages.data() + 2 * kHugePage, std::byte{0}), 2 * kHugePage);
  EXPECT_EQ(std::count(pages.data() + 2 * kHugePage, pages.data() + pages.bytes(), std::byte{7}),
            2 * kHugePage);
}

TEST(PagesTest, WholeHugePagesAreThoseThatFitIn) {
  const Pages pages(3 * kHugePage);
  const auto in = [&](size_t begin, size_t end) {
    const auto whole = whole_huge_pages({pages.data() + begin, end - begin});
    return whole.empty()
               ? std::pair<size_t, size_t>(0, 0)
               : std::pair(static_cast<size_t>(whole.data() - pages.data()), whole.size());
  };
  EXPECT_EQ(in(0, 3 * kHugePage), std::pair(size_t{0}, 3 * kHugePage));
  EXPECT_EQ(in(8, 3 * kHugePage - 8), std::pair(kHugePage, kHugePage));
  EXPECT_EQ(in(8, 2 * kHugePage - 8), std::pair(size_t{0}, size_t{0}));
  EXPECT_EQ(in(kHugePage, kHugePage), std::pair(size_t{0}, size_t{0}));
}

TEST(PagesTest, DiscardGivesWholePagesBack) {
  const Pages pages(4 * kHugePage);
  std::memset(pages.data(), 7, pages.bytes());
  discard({pages.data() + 100, pages.bytes() - 200});
  discard({pages.data() + 100, 4096});  // Of two pages a part.
  discard({});
  EXPECT_EQ(test::resident_bytes({pages.data(), pages.bytes()}), 2 * 4096);
  EXPECT_EQ(std::count(pages.data(), pages.data() + pages.bytes(), std::byte{7}), 2 * 4096);
}

}  // namespace pages_test
}  // namespace cohort::ps
