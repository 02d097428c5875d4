// SPDX-License-Identifier: Apache-2.0
// A rank on each card, over NCCL, beside the same ranks on the CPU over Gloo.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/comm/accelerator.h"

#include "tests/support/ranks.h"
#include "tests/support/small_net.h"

namespace cohort::test {
namespace ranks_gpu_test {

using comm::ProcessGroup;
using torch::optim::SGD, torch::optim::SGDOptions;

TEST(GpuRanksTest, DataParallelTrainingIsTheCpus) {
  const int cards = comm::init_cuda();
  const auto ends = run_ranks(
      cards,
      [](const ProcessGroup& group) {
        EXPECT_TRUE(group.device().is_cuda());
        const at::Tensor sum = at::full({3}, group.rank() + 1, group.device());
        group.all_reduce(sum);
        EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, group.size() * (group.size() + 1) / 2)));
        std::vector<int> all(static_cast<size_t>(group.size()));
        for (int rank = 0; rank < group.size(); ++rank) all[static_cast<size_t>(rank)] = rank;
        const auto on_cpu = train_small_net<SGD>(group.subgroup(all, "cpu", {.backend = "gloo"}),
                                                 SGDOptions(0.1), 3);
        const auto on_card = train_small_net<SGD>(group, SGDOptions(0.1), 3);
        ASSERT_EQ(on_card.size(), on_cpu.size());
        // Values below 1, and a hundred roundings in three steps' sums of at most 16 terms.
        for (size_t i = 0; i < on_cpu.size(); ++i)
          EXPECT_LE((on_card[i] - on_cpu[i]).abs().max().item<double>(), 100 * 0x1p-24) << i;
      },
      {.backend = "nccl"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

}  // namespace ranks_gpu_test
}  // namespace cohort::test
