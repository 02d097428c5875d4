// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_backend.h"

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <unistd.h>

#include "cohort/base/program.h"
#include "cohort/comm/backend.h"

#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/small_net.h"

namespace cohort::test {
namespace second_backend_test {

using comm::ProcessGroup;

TEST(SecondBackendTest, DataParallelTrainingHasTheBitsOfTheCpu) {
  using torch::optim::AdamW, torch::optim::AdamWOptions;
  device_ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(group.device(), second_device());
    const at::Tensor sum = at::full({3}, group.rank() + 1, group.device());
    group.all_reduce(sum);
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, 3)));
    const auto expected = train_small_net<AdamW>(on_cpu(group), AdamWOptions(0.01), 2);
    expect_same_bits(train_small_net<AdamW>(group, AdamWOptions(0.01), 2), expected);
  });
}

// Rank 1 of three was killed: the others name it.
void expect_rank_1_lost(const std::vector<RankEnd>& ends, const std::string& operation) {
  EXPECT_EQ(ends[1].exit_code, 128 + SIGKILL);
  for (const size_t rank : {0, 2}) {
    EXPECT_EQ(ends[rank].exit_code, kExitLostPeer);
    EXPECT_EQ(ends[rank].output.find(": Failure\n"), std::string::npos) << ends[rank].output;
    EXPECT_NE(ends[rank].output.find("lost rank 1 in " + operation), std::string::npos)
        << ends[rank].output;
  }
}

TEST(SecondBackendTest, ALostRankIsNamedByACollectiveOfTheDevice) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) register_second_backend();
  const auto ends = run_ranks(3,
                              [](const ProcessGroup& group) {
                                const at::Tensor sum = at::ones({3}, group.device());
                                group.all_reduce(sum);
                                if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
                                while (true) group.all_reduce(sum);
                              },
                              {.backend = "second"});
  expect_rank_1_lost(ends, "all_reduce(sum)");
}

// A backend as NCCL is one: the host does not wait for its operations. The device waits in them until
// all ranks have come, or until it is aborted; here they never end otherwise.
class EndlessBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "endless"; }
  void setTimeout(std::chrono::milliseconds) override {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(tensors);
    return c10d::Work::create_from_future(future);
  }
  void abort() override {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    ended_.notify_all();
  }
  // As reading a number from the device: nothing but the device's end, or abort, ends it.
  bool wait_for_device(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, limit, [&] { return aborted_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool aborted_ = false;
};

TEST(SecondBackendTest, ALostRankEndsTheWaitForADevice) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) {
    comm::register_backend(
        "endless", {.device = second_device().type(), .make = [](const auto& request) {
                      return c10::make_intrusive<EndlessBackend>(request.rank, request.world_size);
                    }});
  }
  const auto ends = run_ranks(3,
                              [](const ProcessGroup& group) {
                                group.barrier("start");
                                const at::Tensor sum = at::ones({3}, group.device());
                                group.all_reduce(sum);
                                if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
                                auto& backend = dynamic_cast<EndlessBackend&>(
                                    *group.c10d_group().getBackend(group.device().type()));
                                EXPECT_TRUE(backend.wait_for_device(std::chrono::seconds(60)));
                                group.barrier("end");
                              },
                              {.backend = "endless"});
  expect_rank_1_lost(ends, "barrier \"end\"");
}

}  // namespace second_backend_test
}  // namespace cohort::test
