// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/cgroup.h"

#include <gtest/gtest.h>

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace cgroup_test {

class CgroupTest : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder_ / file).parent_path());
    write_file(folder_ / file, text);
  }
  CgroupLimits limits() const { return cgroup_limits(folder_.path()); }
  TemporaryFolder folder_;
};

TEST_F(CgroupTest, TheTightestOfTheGroupsAroundTheProcessCounts) {
  write("proc/self/cgroup", "0::/job/worker\n");
  write("sys/fs/cgroup/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  write("sys/fs/cgroup/job/worker/memory.max", "max\n");
  write("sys/fs/cgroup/job/worker/cpu.max", "400000 100000\n");
  EXPECT_EQ(limits().memory_bytes, int64_t{4} << 30);
  EXPECT_EQ(limits().cores, 2.5);
}

TEST_F(CgroupTest, VersionOneIsUnderstood) {
  write("proc/self/cgroup", "7:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n1:name=systemd:/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/memory/memory.max", "77");  // Of no hierarchy that the process is in.
  EXPECT_EQ(limits().memory_bytes, int64_t{1} << 30) << "the group's own folder is not there";
  EXPECT_EQ(limits().cores, 1.5);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_FALSE(limits().memory_bytes);
  EXPECT_FALSE(limits().cores);
}

TEST_F(CgroupTest, WithoutGroupsThereIsNoLimit) {
  EXPECT_FALSE(limits().memory_bytes);
  EXPECT_FALSE(limits().cores);
}

}  // namespace cgroup_test
}  // namespace cohort
