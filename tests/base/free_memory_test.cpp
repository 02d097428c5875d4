// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/free_memory.h"

#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <vector>

namespace cohort {
namespace free_memory_test {

constexpr int64_t kMebibyte = int64_t{1} << 20;

TEST(FreeMemoryTest, PrivateMemoryCountsOnceItIsTouchedAndSharedMemoryNever) {
  constexpr int64_t kBytes = 64 * kMebibyte, kRest = 8 * kMebibyte;
  const auto map = [](int kind) {
    return mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
  };
  const int64_t before = private_resident_bytes();
  ASSERT_GT(before, 0);
  void* own = map(MAP_PRIVATE);
  void* shared = map(MAP_SHARED);
  ASSERT_NE(own, MAP_FAILED);
  ASSERT_NE(shared, MAP_FAILED);
  std::memset(shared, 1, kBytes);
  EXPECT_LT(private_resident_bytes(), before + kRest);
  std::memset(own, 1, kBytes);
  EXPECT_GT(private_resident_bytes(), before + kBytes - kRest);
  munmap(own, kBytes);
  munmap(shared, kBytes);
  EXPECT_LT(private_resident_bytes(), before + kRest);
}

TEST(FreeMemoryTest, FreedMemoryThatTheAllocatorKeepsGoesBack) {
  constexpr int64_t kNum = 1024, kBytes = 64 << 10;
  const int64_t before = private_resident_bytes();
  std::vector<void*> pieces;
  for (int64_t i = 0; i < kNum; ++i) {
    pieces.push_back(std::malloc(kBytes));
    std::memset(pieces.back(), 1, kBytes);
  }
  // What lies behind it keeps glibc from giving it back by itself.
  void* last = std::malloc(kBytes);
  std::memset(last, 1, kBytes);
  for (void* piece : pieces) std::free(piece);
  const int64_t kept = private_resident_bytes();
  EXPECT_GT(kept, before + kNum * kBytes / 2);
  release_free_memory();
  EXPECT_LT(private_resident_bytes(), before + kNum * kBytes / 2);
  std::free(last);
}

TEST(MemoryGrowthTest, IsAQuarterOfTheMostOfTheFirstStepsOr256MiB) {
  MemoryGrowth growth;
  const auto first_steps = [&](int64_t most) {
    for (int step = 0; step < MemoryGrowth::kFirstSteps; ++step)
      EXPECT_FALSE(growth.has_grown(step == 3 ? most : most / 10));
  };
  first_steps(400 * kMebibyte);
  EXPECT_FALSE(growth.has_grown(656 * kMebibyte));
  EXPECT_TRUE(growth.has_grown(656 * kMebibyte + 1));
  first_steps(4000 * kMebibyte);
  EXPECT_FALSE(growth.has_grown(3000 * kMebibyte));
  EXPECT_FALSE(growth.has_grown(5000 * kMebibyte));
  EXPECT_TRUE(growth.has_grown(5000 * kMebibyte + 1));
  first_steps(500 * kMebibyte);
  growth.restart();
  first_steps(12000 * kMebibyte);
}

}  // namespace free_memory_test
}  // namespace cohort
