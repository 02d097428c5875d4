// SPDX-License-Identifier: Apache-2.0
// The coalesced forms of collectives, which c10d's users call and ProcessGroup does not.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "cohort/comm/process_group.h"

#include "tests/support/message_of.h"

namespace cohort::test {

/// Gathers two tensors of each rank in both forms, and adds up parts of two others.
inline void expect_coalesced_forms(const comm::ProcessGroup& group) {
  using Tensors = std::vector<at::Tensor>;
  c10d::ProcessGroup& c10d_group = group.c10d_group();
  const int64_t ranks = group.size();
  const auto term = [](int64_t rank, int64_t of) {
    return at::arange(3 + of, at::kInt) + 100 * rank + 10 * of;
  };
  Tensors inputs{term(group.rank(), 0), term(group.rank(), 1)};
  std::vector<Tensors> lists;
  for (int64_t rank = 0; rank < ranks; ++rank)
    lists.push_back({at::zeros({3}, at::kInt), at::zeros({4}, at::kInt)});
  c10d_group.allgather_coalesced(lists, inputs)->wait();
  Tensors whole{at::zeros({ranks * 3}, at::kInt), at::zeros({ranks * 4}, at::kInt)};
  c10d_group.allgather_into_tensor_coalesced(whole, inputs)->wait();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (const int64_t of : {0, 1}) {
      const auto i = static_cast<size_t>(of);
      EXPECT_TRUE(at::equal(lists[static_cast<size_t>(rank)][i], term(rank, of))) << rank << of;
      EXPECT_TRUE(at::equal(whole[i].view({ranks, -1})[rank], term(rank, of))) << rank << of;
    }
  }
  Tensors terms{whole[0] + group.rank(), whole[1] - group.rank()};
  Tensors sums{at::zeros({3}, at::kInt), at::zeros({4}, at::kInt)};
  c10d_group.reduce_scatter_tensor_coalesced(sums, terms)->wait();
  const int64_t of_ranks = ranks * (ranks - 1) / 2;
  EXPECT_TRUE(at::equal(sums[0], ranks * term(group.rank(), 0) + of_ranks));
  EXPECT_TRUE(at::equal(sums[1], ranks * term(group.rank(), 1) - of_ranks));
  // On all ranks, before anything is exchanged.
  Tensors one{at::zeros({3}, at::kInt)};
  EXPECT_NE(message_of<c10::ValueError>([&] {
              c10d_group.reduce_scatter_tensor_coalesced(one, terms);
            }).find("expected as many outputs as inputs, got 1 and 2"),
            std::string::npos);
  EXPECT_EQ(group.all_reduce_sum(1), ranks);
}

}  // namespace cohort::test
