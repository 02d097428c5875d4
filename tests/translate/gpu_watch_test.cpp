// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/gpu_watch.h"

#include <cmath>
#include <cstdlib>
#include <gtest/gtest.h>

namespace cohort::translate {
namespace gpu_watch_test {

using std::chrono::milliseconds;

void set_busy(const char* percent) {
  ::setenv("FAKE_NVML_BUSY", percent, 1);
}

// LD_LIBRARY_PATH leads to tests/base/fake_nvml.cpp, whose second GPU gives no figures.
TEST(GpuWatchTest, SumsUpWhatItSawSinceTheLastTime) {
  GpuWatch watch(GpuWatch::Role::kSamples, milliseconds(0));
  for (const char* percent : {"10", "40"}) {
    set_busy(percent);
    watch.sample_if_due();
  }
  const auto seen = parse_gpu_use(watch.take());
  ASSERT_EQ(seen.size(), 2);
  EXPECT_EQ(seen[0].percent.mean, 25);
  EXPECT_EQ(seen[0].percent.peak, 40);
  EXPECT_EQ(seen[0].memory_gib.mean, 12);
  EXPECT_EQ(seen[0].memory_gib.peak, 12);
  EXPECT_TRUE(std::isnan(seen[1].percent.mean));
  EXPECT_TRUE(std::isnan(seen[1].memory_gib.peak));
  set_busy("70");
  EXPECT_EQ(parse_gpu_use(watch.take()).at(0).percent.mean, 70) << "it looks when it is asked";
}

TEST(GpuWatchTest, LooksOnceAPeriod) {
  set_busy("10");
  GpuWatch watch(GpuWatch::Role::kSamples, std::chrono::hours(1));
  watch.sample_if_due();
  set_busy("40");
  watch.sample_if_due();
  EXPECT_EQ(parse_gpu_use(watch.take()).at(0).percent.peak, 10);
}

TEST(GpuWatchTest, OneThatRestsSaysNothing) {
  GpuWatch watch(GpuWatch::Role::kRests, milliseconds(0));
  watch.sample_if_due();
  EXPECT_EQ(watch.take(), "");
  EXPECT_TRUE(parse_gpu_use("").empty());
}

}  // namespace gpu_watch_test
}  // namespace cohort::translate
