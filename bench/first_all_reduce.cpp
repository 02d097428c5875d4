// SPDX-License-Identifier: Apache-2.0
// The least that a distributed program does: meet, sum one number, leave. bench/compare-start times
// it from outside.
#include <ATen/ops/full.h>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "cohort/base/program.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/rank_info.h"

namespace {

// The most memory that this process ever held, as the kernel counted it.
int64_t peak_rss_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

int run() {
  cohort::comm::ProcessGroup group(cohort::comm::rank_info_from_environment());
  at::Tensor sum = at::full({1}, group.rank() + 1.0);
  group.all_reduce(sum);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::printf("{\"rank\": %d, \"sum\": %g, \"done_at\": %.6f, \"peak_rss_bytes\": %lld}\n",
              group.rank(), sum.item<double>(), std::chrono::duration<double>(now).count(),
              static_cast<long long>(peak_rss_bytes()));
  std::fflush(stdout);
  group.close();
  return cohort::kExitOk;
}

}  // namespace

int main() {
  return cohort::run_program("first_all_reduce", run);
}
