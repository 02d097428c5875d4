// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/parallel_for.h"

#include <atomic>
#include <gtest/gtest.h>
#include <stdexcept>
#include <vector>

namespace cohort::translate {
namespace parallel_for_test {

TEST(ParallelForTest, EverythingIsDoneOnce) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{64}, size_t{65}, size_t{10'000}}) {
    std::vector<int> times(count);
    parallel_for(count, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) ++times[i];
    });
    EXPECT_EQ(times, std::vector<int>(count, 1));
  }
}

// Whichever thread throws it, the caller gets it.
TEST(ParallelForTest, AnErrorReachesTheCaller) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<size_t> done = 0;
    try {
      parallel_for(100'000, [&](size_t begin, size_t end) {
        if (begin >= 640) throw std::runtime_error("at " + std::to_string(begin));
        done += end - begin;
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()).find("at "), 0);
    }
    EXPECT_EQ(done, 640);
  }
}

}  // namespace parallel_for_test
}  // namespace cohort::translate
