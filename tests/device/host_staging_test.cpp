// SPDX-License-Identifier: Apache-2.0
// Gloo for tensors of a device, and what says that it is needed.
#include "cohort/comm/backends/gloo/host_staging.h"

#include <cstdlib>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/cli/group_flags.h"

#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/message_of.h"

namespace cohort::test {
namespace host_staging_test {

using Tensors = std::vector<at::Tensor>;

c10::intrusive_ptr<c10d::Backend> make_staged(const comm::ProcessGroup& group) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      "staged", c10::intrusive_ptr<c10d::Store>::reclaim_copy(&group.store()));
  return comm::gloo_through_host(second_device().type())
      .make({.store = store,
             .rank = group.rank(),
             .world_size = group.size(),
             .timeout = std::chrono::seconds(60),
             .address = "127.0.0.1",
             .interface = ""});
}

at::Tensor on_device(const std::vector<float>& values) {
  return at::tensor(values).to(second_device());
}

void expect_values(const at::Tensor& got, const std::vector<float>& expected) {
  EXPECT_EQ(got.device(), second_device());
  EXPECT_TRUE(at::equal(got.cpu(), at::tensor(expected))) << got.cpu();
}

// Rank r gives 10 r, or 10 r, 10 r + 1, 10 r + 2: a number for each rank.
TEST(HostStagingTest, CollectivesOfADevicesTensors) {
  device_ranks(3, [](const comm::ProcessGroup& group) {
    const auto staged = make_staged(group);
    EXPECT_EQ(staged->getBackendName(), "gloo_mtia");
    const auto own = static_cast<float>(10 * group.rank());
    const bool is_root = group.rank() == 1;
    Tensors sum{on_device({own, 1})};
    const auto work = staged->allreduce(sum);
    EXPECT_TRUE(work->wait());
    expect_values(sum[0], {30, 3});
    const auto of_future = work->getFuture()->value().toTensorVector();
    EXPECT_TRUE(of_future.at(0).is_same(sum[0])) << "hooks of DistributedDataParallel read it";
    Tensors reduced{on_device({own})};
    staged->reduce(reduced, {.rootRank = 1})->wait();
    if (is_root) expect_values(reduced[0], {30});
    Tensors sent{on_device({own})};
    staged->broadcast(sent, {.rootRank = 1})->wait();
    expect_values(sent[0], {10});
    at::Tensor all = on_device({0, 0, 0}), mine = on_device({own});
    staged->_allgather_base(all, mine)->wait();
    expect_values(all, {0, 10, 20});
    at::Tensor part = on_device({0}), whole = on_device({own, own + 1, own + 2});
    staged->_reduce_scatter_base(part, whole)->wait();
    expect_values(part, {30 + 3 * static_cast<float>(group.rank())});
    at::Tensor swapped = on_device({0, 0, 0});
    std::vector<int64_t> equal;
    staged->alltoall_base(swapped, whole, equal, equal)->wait();
    const auto r = static_cast<float>(group.rank());
    expect_values(swapped, {r, 10 + r, 20 + r});
    std::vector<Tensors> gathered;
    if (is_root) gathered.push_back({on_device({0}), on_device({0}), on_device({0})});
    Tensors given{mine};
    staged->gather(gathered, given, {.rootRank = 1})->wait();
    if (is_root) expect_values(gathered[0][2], {20});
    Tensors scattered{on_device({0})};
    staged->scatter(scattered, gathered, {.rootRank = 1})->wait();
    expect_values(scattered[0], {own});
    // Each sends to the next before it takes what the one before it sends.
    Tensors message{on_device({own})}, taken{on_device({-1})};
    const auto sending = staged->send(message, (group.rank() + 1) % 3, 7);
    staged->recv(taken, (group.rank() + 2) % 3, 7)->wait();
    sending->wait();
    expect_values(taken[0], {static_cast<float>(10 * ((group.rank() + 2) % 3))});
  });
}

TEST(HostStagingTest, TwoRanksOnOneCardAreNamed) {
  device_ranks(3, [](const comm::ProcessGroup& group) {
    const std::string error = message_of<ConfigError>(
        [&] { cli::check_cards_differ(group, group.rank() == 1 ? "8f" : "5e"); });
    EXPECT_TRUE(error.starts_with("ranks 0 and 2 compute on one card of host ")) << error;
    EXPECT_NE(error.find(", with the UUID 5e, and NCCL takes one rank on each: expected fewer "
                         "ranks, or --dist-backend gloo"),
              std::string::npos)
        << error;
    // Each sees its own card as number 0, as in the cgroups of Slurm's tasks.
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    cli::check_cards_differ(group, std::to_string(group.rank()));
    // The driver does not tell.
    cli::check_cards_differ(group, "");
  });
}

}  // namespace host_staging_test
}  // namespace cohort::test
