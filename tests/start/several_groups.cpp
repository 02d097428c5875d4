// SPDX-License-Identifier: Apache-2.0
// Ten process groups of all ranks, one after another, then three side by side; rank 0 prints the
// number of ranks as JSON. Whatever is wrong ends it with an error.
#include <cstdio>
#include <memory>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/comm/process_group.h"

namespace {

using cohort::comm::ProcessGroup;

void check_sum(const ProcessGroup& group, int number) {
  const int64_t sum = group.all_reduce_sum(number);
  TORCH_CHECK(sum == int64_t{number} * group.size(), "group ", number, ": expected ",
              number * group.size(), ", got ", sum);
}

int run() {
  const auto info = cohort::comm::rank_info_from_environment();
  const cohort::comm::ProcessGroupOptions options{.rendezvous_timeout = std::chrono::seconds(60),
                                                  .timeout = std::chrono::seconds(60)};
  for (int i = 1; i <= 10; ++i) {
    ProcessGroup group(info, options);
    check_sum(group, i);
    // Half of them say good-bye to each other, half just end.
    if (i % 2 == 0) group.close();
  }
  std::vector<ProcessGroup> groups;
  for (int i = 0; i < 3; ++i) groups.emplace_back(info, options);
  for (int round = 0; round < 5; ++round) {
    for (int i : {2, 0, 1}) check_sum(groups[static_cast<size_t>(i)], 100 * round + i);
  }
  groups[1].close();
  groups[1] = {};
  for (int i : {0, 2}) check_sum(groups[static_cast<size_t>(i)], 7 + i);
  groups[0].close();
  groups[2].close();
  if (info.rank == 0) std::printf("{\"world_size\": %d}\n", info.world_size);
  return cohort::kExitOk;
}

}  // namespace

int main() {
  return cohort::run_program("several_groups", run);
}
