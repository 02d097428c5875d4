// SPDX-License-Identifier: Apache-2.0
// Workers beside their GPUs, on machines that are folders.
#include "cohort/launch/gpu_nodes.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/launch/cores.h"

#include "tests/launch/launch_harness.h"
#include "tests/support/message_of.h"

namespace cohort::launch {
namespace gpu_nodes_test {

using Cores = std::vector<int>;

// A machine's /proc and /sys, as far as they tell of GPUs and nodes.
class Machine {
 public:
  void add_gpu(const std::string& address, const std::string& uuid, const std::string& node) {
    const std::string minor = std::to_string(num_gpus_++);
    write("/proc/driver/nvidia/gpus/" + address + "/information",
          "Model: \t\t NVIDIA Fake\nGPU UUID: \t " + uuid + "\nDevice Minor: \t " + minor + "\n");
    write("/dev/nvidia" + minor, "");
    write("/sys/bus/pci/devices/" + address + "/numa_node", node + "\n");
  }
  void add_node(int number, const std::string& cores) const {
    write("/sys/devices/system/node/node" + std::to_string(number) + "/cpulist", cores + "\n");
  }
  const std::string& root() const { return folder_.path(); }
  // A device cgroup keeps it from this process, or a container lacks it.
  void hide_device(int minor) const {
    std::filesystem::remove(root() + "/dev/nvidia" + std::to_string(minor));
  }

 private:
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root() + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  TemporaryFolder folder_;
  int num_gpus_ = 0;
};

class GpuNodesTest : public testing::Test {
 protected:
  GpuNodesTest() {
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    machine_.add_gpu("0000:9f:00.0", "GPU-3333", "-1");
    machine_.add_gpu("0000:10:00.0", "GPU-2211", "0");
    machine_.add_gpu("0000:0f:00.0", "GPU-1111", "1");
    machine_.add_node(0, "0-1,4");
    machine_.add_node(1, "2-3,5");
  }
  ~GpuNodesTest() override { ::unsetenv("CUDA_VISIBLE_DEVICES"); }
  std::vector<Cores> cores_of(int num_workers) const {
    return cores_beside_gpus({0, 1, 2, 3, 4, 5, 6}, num_workers, machine_.root());
  }
  std::string refusal(int num_workers, const Cores& cores = {0, 2}) const {
    return test::message_of<ConfigError>(
        [&] { cores_beside_gpus(cores, num_workers, machine_.root()); });
  }

  Machine machine_;
};

TEST_F(GpuNodesTest, GpusAreCountedByTheirAddresses) {
  EXPECT_EQ(cores_of(2), (std::vector<Cores>{{2, 3, 5}, {0, 1, 4}}));
  EXPECT_EQ(cores_of(3).back(), (Cores{0, 1, 4})) << "its node is not told";
  EXPECT_EQ(cores_beside_gpus({1, 5}, 2, machine_.root()), (std::vector<Cores>{{5}, {1}}))
      << "those of this process";
}

TEST_F(GpuNodesTest, TheVisibleOnesCount) {
  ::setenv("CUDA_VISIBLE_DEVICES", "1,GPU-11", 1);
  EXPECT_EQ(cores_of(2), (std::vector<Cores>{{0, 1, 4}, {2, 3, 5}}));
  ::setenv("CUDA_VISIBLE_DEVICES", "0,-1,1", 1);
  EXPECT_EQ(cores_of(1), (std::vector<Cores>{{2, 3, 5}}));
  EXPECT_EQ(
      refusal(2),
      "--numa-binding node: expected a GPU of /proc/driver/nvidia/gpus for each of 2 workers, "
      "got 1");
  for (const char* entry : {"3", "GPU-4", "GPU-", "MIG-1"}) {
    ::setenv("CUDA_VISIBLE_DEVICES", entry, 1);
    EXPECT_EQ(refusal(1),
              "--numa-binding node: expected CUDA_VISIBLE_DEVICES to list numbers below 3, this "
              "node's GPUs, or their UUIDs, got " +
                  std::string(entry));
  }
}

// As for a task of Slurm, whose cgroup has one of the node's GPUs, which is number 0 there.
TEST_F(GpuNodesTest, OnlyThoseCountWhoseDeviceCanBeOpened) {
  machine_.hide_device(2);  // 0000:0f:00.0
  EXPECT_EQ(cores_of(1), (std::vector<Cores>{{0, 1, 4}}));
  ::setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  EXPECT_EQ(cores_of(1), (std::vector<Cores>{{0, 1, 4}}));
  ::setenv("CUDA_VISIBLE_DEVICES", "2", 1);
  EXPECT_NE(refusal(1).find("to list numbers below 2"), std::string::npos) << refusal(1);
}

TEST_F(GpuNodesTest, ANodeWithoutACoreIsRefused) {
  EXPECT_EQ(refusal(1, {0, 1}),
            "--numa-binding node: expected a core that this process may use on NUMA node 1, where "
            "the GPU 0000:0f:00.0 is, got none");
  const Machine empty;
  EXPECT_EQ(test::message_of<ConfigError>([&] { cores_beside_gpus({0}, 1, empty.root()); }),
            "--numa-binding node: expected a GPU of /proc/driver/nvidia/gpus for each of 1 worker, "
            "got 0");
}

TEST_F(GpuNodesTest, ACoreHasOneThread) {
  EXPECT_EQ(threads_each({{0, 1, 4}, {2, 3, 5}}), 3);
  EXPECT_EQ(threads_each({{0, 1, 4}, {0, 1, 4}, {2, 3, 5}}), 1);
  EXPECT_EQ(threads_each({{0}, {0}}), 1);
}

TEST_F(GpuNodesTest, AWorkerRunsBesideItsGpu) {
  const int first = usable_cores().front(), last = usable_cores().back();
  ASSERT_NE(first, last) << "needs two cores";
  Machine machine;
  machine.add_gpu("0000:0f:00.0", "GPU-1111", "1");
  machine.add_gpu("0000:10:00.0", "GPU-2222", "0");
  machine.add_node(0, std::to_string(first));
  machine.add_node(1, std::to_string(last));
  Launched run({this_program(), "--worker", "bound"},
               {"COHORT_TEST_MACHINE=" + machine.root(), "OMP_NUM_THREADS="});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(sorted_lines(ended.out),
            (std::vector<std::string>{"[rank 0] 1 threads, cores " + std::to_string(last),
                                      "[rank 1] 1 threads, cores " + std::to_string(first)}));
  EXPECT_NE(ended.err.find(": 2 workers, 1 thread each, cores " + std::to_string(last) + " | " +
                           std::to_string(first)),
            std::string::npos)
      << ended.err;
}

TEST_F(GpuNodesTest, TorchrunsOtherWordsAreRefused) {
  const auto error_with = [](const std::vector<std::string>& flags) {
    Launched run(cohort_run(flags, {"true"}));
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 2);
    return ended.err;
  };
  for (const std::string word : {"socket", "exclusive", "core-complex"}) {
    EXPECT_NE(error_with({"--numa-binding", word}).find(word + ": expected node"),
              std::string::npos);
  }
  EXPECT_NE(error_with({"--numa_binding=node", "--bind-cores=cores"}).find(" excludes --"),
            std::string::npos);
}

}  // namespace gpu_nodes_test
}  // namespace cohort::launch
