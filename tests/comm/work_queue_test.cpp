// SPDX-License-Identifier: Apache-2.0
// The queue of a backend's operations, and of HierarchicalBackend what needs no processes: how long
// it connects, and how it ends with operations in the queue. Ranks are threads.
#include "cohort/comm/backends/work_queue.h"

#include <ATen/ops/ones.h>
#include <csignal>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>

#include "cohort/base/process_stat.h"
#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/backends/hierarchical/hierarchical_backend.h"
#include "cohort/comm/backends/shm/shm_backend.h"
#include "cohort/comm/rendezvous.h"

namespace cohort::comm {
namespace work_queue_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

c10::intrusive_ptr<QueuedWork> work_of(std::function<void()> run) {
  return c10::make_intrusive<QueuedWork>(0, c10d::OpType::BARRIER, nullptr,
                                         std::vector<at::Tensor>{}, std::move(run));
}

// On the caller's thread, then on the queue's. What is thrown is no std::exception.
TEST(WorkQueueTest, AnOperationThatThrowsAnythingEndsAndTheNextOneRuns) {
  for (const bool in_background : {false, true}) {
    WorkQueue queue("queue-test");
    const auto bad = work_of([] { throw 7; });
    queue.launch(bad, in_background);
    EXPECT_THROW(bad->wait(milliseconds(60000)), int);
    const auto next = work_of([] {});
    queue.launch(next, in_background);
    EXPECT_TRUE(next->wait(milliseconds(60000)));
  }
}

TEST(WorkQueueTest, ACallbackThatThrowsEndsItsOperationAndTheNextOneRuns) {
  for (const bool in_background : {false, true}) {
    WorkQueue queue("queue-test");
    const auto bad = work_of([] {});
    bad->getFuture()->addCallback(
        [](c10::ivalue::Future&) { throw std::runtime_error("the callback's"); });
    queue.launch(bad, in_background);
    EXPECT_THROW(bad->wait(milliseconds(60000)), std::runtime_error);
    const auto next = work_of([] {});
    queue.launch(next, in_background);
    EXPECT_TRUE(next->wait(milliseconds(60000)));
  }
}

// A backend that is dropped then would abort its peers for nothing.
TEST(WorkQueueTest, AnOperationWhoseEndIsSeenIsNotUnderWay) {
  for (const bool in_background : {false, true}) {
    WorkQueue queue("queue-test");
    const auto work = work_of([] {});
    bool busy = true;
    work->getFuture()->addCallback([&](c10::ivalue::Future&) { busy = queue.is_busy(); });
    queue.launch(work, in_background);
    work->wait(milliseconds(60000));
    EXPECT_FALSE(busy);
  }
}

BackendRequest request(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                       std::vector<std::string> memory, milliseconds timeout) {
  return {.store = store,
          .rank = rank,
          .world_size = static_cast<int>(memory.size()),
          .timeout = timeout,
          .address = "127.0.0.1",
          .memory = std::move(memory)};
}

// The other rank comes late to the first of the three connections, and never to the second.
TEST(HierarchicalConnectTest, AllConnectionsTogetherTakeAtMostTheTimeout) {
  constexpr milliseconds kLate(4000), kTimeout(5000);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto begin = steady_clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(kLate);
    auto all = request(store, 1, {"a", "a"}, kTimeout);
    all.store = c10::make_intrusive<c10d::PrefixStore>("all", store);
    try {
      make_gloo_backend(all);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): rank 0 has given up.
    }
  });
  EXPECT_ANY_THROW(make_hierarchical_backend(request(store, 0, {"a", "a"}, kTimeout)));
  EXPECT_GT(steady_clock::now() - begin, kLate) << "the first connection was made";
  EXPECT_LT(steady_clock::now() - begin, kLate + kTimeout - milliseconds(500))
      << "a timeout for each";
  other.join();
}

// Rank 1 comes late, rank 2 never.
TEST(ShmConnectTest, AllRanksTogetherAreWaitedForAtMostTheTimeout) {
  constexpr milliseconds kLate(2500), kTimeout(3000);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const auto begin = steady_clock::now();
  std::thread late([&] {
    std::this_thread::sleep_for(kLate);
    store->set("process/1", own_host() + " " + std::to_string(getpid()) + " " +
                                process_stat(getpid(), 22) + " 0");
  });
  EXPECT_THROW(make_shm_backend(request(store, 0, {"a", "a", "a"}, kTimeout)), c10::DistStoreError);
  EXPECT_TRUE(store->check({"process/0"})) << "ranks come under such keys";
  EXPECT_GT(steady_clock::now() - begin, kLate) << "rank 1 came, and was understood";
  EXPECT_LT(steady_clock::now() - begin, kLate + kTimeout - milliseconds(500))
      << "a timeout for each";
  late.join();
}

// Rank 3 calls nothing, so nothing can be over before the backends go. Gloo may write to a rank that
// is gone: SIGPIPE is handled as it is where a ProcessGroup makes the backend.
TEST(HierarchicalConnectTest, DestructionEndsWhatIsQueued) {
  ASSERT_NE(std::signal(SIGPIPE, SIG_IGN), SIG_ERR);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<c10d::Work>> works[4];
  std::vector<std::thread> ranks;
  milliseconds took[4];
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      auto backend = make_hierarchical_backend(
          request(store, rank, {"a", "b", "a", "b"}, milliseconds(60000)));
      for (int i = 0; rank != 3 && i < 4; ++i) {
        std::vector<at::Tensor> tensors{at::ones({1 << 20})};
        works[rank].push_back(backend->allreduce(tensors, {}));
      }
      std::this_thread::sleep_for(milliseconds(rank * 50));
      const auto begin = steady_clock::now();
      backend.reset();
      took[rank] = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_LT(took[rank], milliseconds(10000)) << rank;
    EXPECT_EQ(works[rank].size(), rank == 3 ? 0 : 4);
    for (const auto& work : works[rank]) {
      EXPECT_TRUE(work->isCompleted()) << rank;
      EXPECT_FALSE(work->isSuccess()) << rank;
    }
  }
}

}  // namespace work_queue_test
}  // namespace cohort::comm
