// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/gpu_monitor.h"

#include <cmath>
#include <cstdlib>
#include <gtest/gtest.h>
#include <thread>

#include "cohort/base/machine.h"

namespace cohort {
namespace gpu_monitor_test {

// LD_LIBRARY_PATH leads to fake_nvml.cpp.
TEST(GpuMonitorTest, ReadsTheDriversFiguresAndSaysWhichAreMissing) {
  const auto gpus = GpuMonitor().sample();
  ASSERT_EQ(gpus.size(), 2);
  EXPECT_EQ(gpus[0].name, "NVIDIA Fake 80GB");
  EXPECT_EQ(gpus[0].busy_percent, 87);
  EXPECT_EQ(gpus[0].memory_used_bytes, 12.0 * (1 << 30));
  EXPECT_EQ(gpus[0].memory_bytes, 80.0 * (1 << 30));
  EXPECT_EQ(gpus[1].name, "NVIDIA Mute");
  EXPECT_TRUE(std::isnan(gpus[1].busy_percent));
  EXPECT_TRUE(std::isnan(gpus[1].memory_used_bytes));
}

TEST(GpuMonitorTest, ALibraryWithoutADriverIsNoGpu) {
  ::setenv("FAKE_NVML_NO_DRIVER", "1", 1);
  EXPECT_TRUE(GpuMonitor().sample().empty());
  ::unsetenv("FAKE_NVML_NO_DRIVER");
}

TEST(MachineTest, KnowsHostCoresAndMemory) {
  const Machine machine = this_machine();
  EXPECT_FALSE(machine.host.empty());
  EXPECT_GE(machine.cores, 1);
  EXPECT_LE(machine.cores, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GT(machine.memory_bytes, int64_t{1} << 28);
#ifdef __x86_64__
  EXPECT_FALSE(machine.cpu.empty());
#endif
  ASSERT_EQ(machine.gpus.size(), 2);
  EXPECT_EQ(machine.gpus[0].name, "NVIDIA Fake 80GB");
}

}  // namespace gpu_monitor_test
}  // namespace cohort
