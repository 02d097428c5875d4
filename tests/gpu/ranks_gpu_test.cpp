// SPDX-License-Identifier: Apache-2.0
// A rank on each card, over NCCL, beside the same ranks on the CPU over Gloo.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/comm/accelerator.h"
#include "cohort/comm/backend.h"

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

// The watch asks it while the card computes, and no tensor lives longer for it.
TEST(GpuRanksTest, TheProgressOfANcclWorkKeepsNoTensor) {
  comm::init_cuda();
  const comm::BackendPlugin& nccl = comm::find_backend("nccl");
  comm::BackendRequest request;
  request.store = c10::make_intrusive<c10d::HashStore>();
  request.timeout = std::chrono::seconds(60);
  const auto backend = nccl.make(request);
  std::vector<at::Tensor> tensors{at::ones({1 << 20}, at::kCUDA)};
  const c10d::AllreduceOptions options;
  backend->allreduce(tensors, options)->wait();  // connects
  at::Tensor product = at::ones({8192, 8192}, at::kCUDA);
  for (int i = 0; i < 20; ++i) product = at::matmul(product, product);  // 22 Tflop
  auto work = backend->allreduce(tensors, options);
  const auto progress = nccl.progress(*work);
  EXPECT_FALSE(progress->isCompleted());
  work->wait();
  const auto memory = tensors[0].storage().getWeakStorageImpl();
  work.reset();
  tensors.clear();
  EXPECT_TRUE(memory.expired());
  EXPECT_TRUE(product.sum().isinf().item<bool>());  // waits for the card
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!progress->isCompleted() && std::chrono::steady_clock::now() < limit) {
  }
  EXPECT_TRUE(progress->isCompleted());
  backend->shutdown();
}

}  // namespace ranks_gpu_test
}  // namespace cohort::test
