// SPDX-License-Identifier: Apache-2.0
// Ranks that are forks of a program which has libtorch.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <thread>

#include "cohort/base/env.h"
#include "cohort/launch/spawn.h"

namespace cohort::launch {
namespace spawned_threads_test {

// OpenMP read OMP_NUM_THREADS before the launcher computed it.
TEST(SpawnedThreadsTest, RanksComputeWithTheThreadsThatTheLauncherGivesThem) {
  ::unsetenv("OMP_NUM_THREADS");
  // As OpenMP has it where the variable was not set, all cores; at::set_num_threads would start them.
  using SetThreads = void (*)(int);
  const auto set = reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  ASSERT_NE(set, nullptr);
  set(1000);
  const auto rank = [](int /*local_rank*/) {
    const auto given = env_int("OMP_NUM_THREADS");
    int of_thread = 0;
    std::thread([&] { of_thread = at::get_num_threads(); }).join();
    return given == at::get_num_threads() && given == of_thread ? 0 : 9;
  };
  EXPECT_EQ(spawn(rank, 2), 0);
}

}  // namespace spawned_threads_test
}  // namespace cohort::launch
