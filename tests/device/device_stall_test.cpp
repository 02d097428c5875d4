// SPDX-License-Identifier: Apache-2.0
// Ranks whose devices wait for a call that another rank does not make: who is told, what, and when.
#include <ATen/ops/ones.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>
#include <mutex>
#include <numeric>
#include <regex>
#include <sys/wait.h>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unistd.h>

#include "cohort/base/program.h"
#include "cohort/comm/backend.h"

#include "tests/device/second_backend.h"
#include "tests/device/second_device.h"
#include "tests/support/message_of.h"
#include "tests/support/names_difference.h"
#include "tests/support/ranks.h"

namespace cohort::test {
namespace device_stall_test {

using comm::ProcessGroup;
using std::chrono::milliseconds, std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// What one rank's device does. It is in its n-th operation until all ranks' devices are in their
// n-th, and that is the same; and for ever if it is another. Nothing is computed.
class Meetings {
 public:
  Meetings(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(store->clone()), rank_(rank), size_(size) {}

  int64_t begin(const std::string& what) {
    const std::lock_guard lock(mutex_);
    ++num_begun_;
    store_->set(key(num_begun_, rank_), what);
    return num_begun_;
  }
  bool has_ended(int64_t number) {
    const std::lock_guard lock(mutex_);
    while (!aborted_ && num_ended_ < number && all_are_in(num_ended_ + 1)) ++num_ended_;
    return aborted_ || num_ended_ >= number;
  }
  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
  }
  bool is_aborted() {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }
  int64_t num_begun() {
    const std::lock_guard lock(mutex_);
    return num_begun_;
  }

 private:
  static std::string key(int64_t number, int rank) {
    return "device/" + std::to_string(number) + "/" + std::to_string(rank);
  }
  bool all_are_in(int64_t number) {
    const auto mine = store_->get(key(number, rank_));
    for (int peer = 0; peer < size_; ++peer) {
      if (!store_->check({key(number, peer)}) || store_->get(key(number, peer)) != mine)
        return false;
    }
    return true;
  }

  std::mutex mutex_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  int64_t num_begun_ = 0, num_ended_ = 0;
  bool aborted_ = false;
};

// While it is set a query of the device blocks, as where another thread has the driver's lock.
std::atomic<bool> driver_is_locked = false;

// As NCCL's: `wait` orders what is queued on the device, and returns.
class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(std::shared_ptr<Meetings> device, int64_t number)
      : device_(std::move(device)), number_(number) {}
  bool isCompleted() override {
    while (driver_is_locked) std::this_thread::sleep_for(milliseconds(20));
    return device_->has_ended(number_);
  }
  bool wait(milliseconds) override { return true; }

 private:
  const std::shared_ptr<Meetings> device_;
  const int64_t number_;
};

class QueuedBackend final : public c10d::Backend {
 public:
  explicit QueuedBackend(const comm::BackendRequest& request)
      : c10d::Backend(request.rank, request.world_size),
        device_(std::make_shared<Meetings>(request.store, request.rank, request.world_size)) {}

  const std::string getBackendName() const override { return "queued"; }
  void setTimeout(milliseconds) override {}
  void abort() override { device_->abort(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    return begin("allreduce", tensors);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions&) override {
    return begin("broadcast", tensors);
  }

  // As reading a number from the device: nothing but the device's end, or abort, ends it.
  void synchronize() {
    const int64_t last = device_->num_begun();
    const auto limit = Clock::now() + seconds(60);
    while (Clock::now() < limit && !device_->has_ended(last))
      std::this_thread::sleep_for(milliseconds(20));
    EXPECT_TRUE(device_->has_ended(last));
  }
  bool is_aborted_soon() {
    const auto limit = Clock::now() + seconds(60);
    while (Clock::now() < limit && !device_->is_aborted())
      std::this_thread::sleep_for(milliseconds(20));
    return device_->is_aborted();
  }

 private:
  c10::intrusive_ptr<c10d::Work> begin(const std::string& what,
                                       const std::vector<at::Tensor>& tensors) {
    const std::string all = what + " of " + std::to_string(tensors.front().numel());
    return c10::make_intrusive<QueuedWork>(device_, device_->begin(all));
  }

  const std::shared_ptr<Meetings> device_;
};

QueuedBackend& device_of(const ProcessGroup& group) {
  return dynamic_cast<QueuedBackend&>(*group.c10d_group().getBackend(group.device().type()));
}

using Body = std::function<void(const ProcessGroup& group, const at::Tensor& data)>;

// Runs `body` on ranks over that backend, after a first call of each kind, which ranks compare.
std::vector<RankEnd> queued_ranks(int world_size, seconds timeout, const Body& body,
                                  const std::string& backend = "queued") {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) {
    comm::register_backend("queued",
                           {.device = second_device().type(), .make = [](const auto& request) {
                              return c10::make_intrusive<QueuedBackend>(request);
                            }});
  }
  return run_ranks(world_size,
                   [&](const ProcessGroup& group) {
                     const at::Tensor data = at::ones({4}, second_device());
                     if (backend == "queued") {
                       for (const int64_t length : {2, 4})
                         group.all_reduce(data.narrow(0, 0, length));
                       group.broadcast(data);
                       device_of(group).synchronize();
                     }
                     body(group, data);
                   },
                   {.backend = backend, .timeout = timeout});
}

void expect_lost_peer(const RankEnd& end) {
  EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
}

void expect_no_alarm(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, 0) << end.output;
    EXPECT_EQ(end.output.find("rank 1"), std::string::npos) << end.output;
  }
}

// All ranks do that, and name `texts`.
void expect_told(const std::vector<RankEnd>& ends, const std::vector<std::string>& texts) {
  for (const RankEnd& end : ends) {
    expect_lost_peer(end);
    for (const std::string& text : texts)
      EXPECT_NE(end.output.find(text), std::string::npos) << end.output << "expected: " << text;
  }
}

// All ranks do, in the barrier "next", and name the calls of rank 1 and of another.
void expect_difference(const std::vector<RankEnd>& ends, const std::string& odd,
                       const std::string& usual) {
  expect_told(ends, {"the ranks disagree in barrier \"next\""});
  const std::string at = " at device_stall_test.cpp:";
  for (const RankEnd& end : ends) {
    EXPECT_TRUE(
        names_difference(end.output, static_cast<int>(ends.size()), 1, odd + at, usual + at))
        << end.output;
  }
}

// From the call to the end of the wait for the device.
milliseconds waited_for(const ProcessGroup& group) {
  const auto start = Clock::now();
  device_of(group).synchronize();
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

// Each case on two ranks and on three.
class DeviceStallTest : public testing::TestWithParam<int> {
 protected:
  int world_size() const { return GetParam(); }
  std::string the_others() const { return world_size() == 2 ? "rank 0" : "ranks 0, 2"; }
};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceStallTest, testing::Values(2, 3));

TEST_P(DeviceStallTest, ARankThatNeverCallsIsNamedAtTheTimeout) {
  const auto ends =
      queued_ranks(world_size(), seconds(4), [](const ProcessGroup& group, const at::Tensor& data) {
        if (group.rank() == 1) {
          EXPECT_TRUE(device_of(group).is_aborted_soon());
        } else {
          group.all_reduce_async(data).wait();
          const auto waited = waited_for(group);
          EXPECT_GE(waited, milliseconds(3000)) << "the other may have begun a second earlier";
          EXPECT_LT(waited, seconds(12)) << "the timeout, two seconds, and a busy machine";
        }
        group.barrier("next");
      });
  expect_told(
      ends,
      {"lost a peer in barrier \"next\"",
       "rank 1 has not come to all_reduce(sum) of float32[4] at device_stall_test.cpp:",
       ", call 4 of group \"world\", for which the devices of " + the_others() + " wait since ",
       ": outside of collectives since ", ", last called broadcast from 0 of float32[4]"});
  for (const RankEnd& end : ends)  // the timeout, and two seconds; or a second less, as above
    EXPECT_TRUE(std::regex_search(end.output, std::regex("wait since ([3-9]|1[0-9])\\.")))
        << end.output;
}

// As c10d's Reducer calls it with gradients: no operation of Cohort's.
TEST_P(DeviceStallTest, ACallOnTheGroupOfC10dIsWatched) {
  const auto ends =
      queued_ranks(world_size(), seconds(4), [](const ProcessGroup& group, const at::Tensor& data) {
        std::vector<at::Tensor> tensors{data};
        group.c10d_group().allreduce(tensors)->wait();
        device_of(group).synchronize();
        if (group.rank() == 1) {
          EXPECT_TRUE(device_of(group).is_aborted_soon());
        } else {
          group.c10d_group().allreduce(tensors)->wait();
          device_of(group).synchronize();
        }
        group.all_reduce_async(data).wait();
      });
  expect_told(ends, {"rank 1 has not come to c10d's all_reduce of float32[4], call 2 of group",
                     "lost a peer in all_reduce(sum)"});
}

TEST_P(DeviceStallTest, ARankThatCallsAnotherOperationIsNamed) {
  const auto ends = queued_ranks(
      world_size(), seconds(20), [](const ProcessGroup& group, const at::Tensor& data) {
        auto work = group.rank() == 1 ? group.broadcast_async(data) : group.all_reduce_async(data);
        work.wait();
        EXPECT_LT(waited_for(group), seconds(15)) << "ranks compare after two seconds";
        group.barrier("next");
      });
  expect_difference(ends, "broadcast from 0 of float32[4]", "all_reduce(sum) of float32[4]");
}

// No rank's log has that call any more when its device is stuck in it.
TEST_P(DeviceStallTest, ADifferenceManyCallsAgoIsNamed) {
  const auto ends = queued_ranks(
      world_size(), seconds(20), [](const ProcessGroup& group, const at::Tensor& data) {
        if (group.rank() == 1) {
          group.broadcast_async(data).wait();
        } else {
          group.all_reduce_async(data.narrow(0, 0, 2)).wait();
        }
        for (int i = 0; i < 80; ++i) group.all_reduce_async(data).wait();
        EXPECT_LT(waited_for(group), seconds(15)) << "ranks compare after two seconds";
        group.barrier("next");
      });
  expect_told(ends, {"the ranks disagree in barrier \"next\"",
                     "rank 1 calls broadcast from 0 of float32[4] at device_stall_test.cpp:"});
  // Any other rank may be the one that still knows its call, and either may be named first.
  const std::regex other(
      "rank [02] calls all_reduce\\(sum\\) of float32\\[2\\] at device_stall_test");
  for (const RankEnd& end : ends) EXPECT_TRUE(std::regex_search(end.output, other)) << end.output;
}

// For longer than five signs of life.
TEST_P(DeviceStallTest, ARankWhoseDriverIsLockedIsNotLost) {
  const auto ends = queued_ranks(world_size(), seconds(60),
                                 [](const ProcessGroup& group, const at::Tensor& data) {
                                   if (group.rank() == 1) {
                                     group.all_reduce_async(data).wait();
                                     driver_is_locked = true;
                                   }
                                   std::this_thread::sleep_for(seconds(16));
                                   driver_is_locked = false;
                                   if (group.rank() != 1) group.all_reduce_async(data).wait();
                                   device_of(group).synchronize();
                                   group.barrier("next");
                                 });
  expect_no_alarm(ends);
}

// It answers the liveness check, too.
TEST_P(DeviceStallTest, ARankWhoseDriverIsLockedIsToldWhoIsMissing) {
  const auto ends =
      queued_ranks(world_size(), seconds(4), [](const ProcessGroup& group, const at::Tensor& data) {
        if (group.rank() == 1) {
          EXPECT_TRUE(device_of(group).is_aborted_soon());
        } else {
          group.all_reduce_async(data).wait();
          driver_is_locked = true;
          EXPECT_TRUE(device_of(group).is_aborted_soon());
          driver_is_locked = false;
        }
        group.barrier("next");
      });
  expect_told(ends, {"rank 1 has not come to all_reduce(sum) of float32[4] at "});
}

// All of them at once, as a batch system does with a job, for longer than the timeout.
void stop_for_12_seconds(const std::vector<std::string>& processes) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (const std::string& each : processes) ::kill(std::stoi(each), SIGSTOP);
    ::sleep(12);
    for (const std::string& each : processes) ::kill(std::stoi(each), SIGCONT);
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST_P(DeviceStallTest, AJobThatWasStoppedGoesOn) {
  const auto ends = queued_ranks(
      world_size(), seconds(10), [](const ProcessGroup& group, const at::Tensor& data) {
        const auto processes = group.all_gather_object(std::to_string(::getpid()));
        group.barrier("stop");
        const auto stop = Clock::now();
        if (group.rank() != 1) group.all_reduce_async(data).wait();
        if (group.rank() == 0) stop_for_12_seconds(processes);
        std::this_thread::sleep_until(stop + seconds(15));  // the watch looks
        if (group.rank() == 1) group.all_reduce_async(data).wait();
        device_of(group).synchronize();
        group.barrier("next");
      });
  expect_no_alarm(ends);
}

TEST_P(DeviceStallTest, AClosedJobHasNoNewGroups) {
  const auto ends = queued_ranks(
      world_size(), seconds(20), [](const ProcessGroup& group, const at::Tensor& data) {
        std::vector<int> ranks(static_cast<size_t>(group.size()));
        std::iota(ranks.begin(), ranks.end(), 0);
        const ProcessGroup rows = group.subgroup(ranks, "rows");
        rows.all_reduce(data);
        device_of(rows).synchronize();
        group.close();
        EXPECT_EQ(message_of<c10::ValueError>([&] { rows.subgroup(ranks, "late"); }),
                  "subgroup \"late\": expected an open group of all ranks, but it was closed");
      });
  for (const RankEnd& end : ends) {  // which then closes the group again
    EXPECT_EQ(end.output.find(": Failure\n"), std::string::npos) << end.output;
    EXPECT_NE(end.output.find("\"world\" was closed"), std::string::npos) << end.output;
  }
}

TEST_P(DeviceStallTest, ARankThatCallsWithAnotherShapeIsNamed) {
  const auto ends = queued_ranks(
      world_size(), seconds(20), [](const ProcessGroup& group, const at::Tensor& data) {
        group.all_reduce_async(group.rank() == 1 ? data.narrow(0, 0, 2) : data).wait();
        EXPECT_LT(waited_for(group), seconds(15)) << "ranks compare after two seconds";
        group.barrier("next");
      });
  expect_difference(ends, "all_reduce(sum) of float32[2]", "all_reduce(sum) of float32[4]");
}

TEST_P(DeviceStallTest, OfTwoGroupsTheOneThatStandsStillIsNamed) {
  const auto ends = queued_ranks(
      world_size(), seconds(60), [](const ProcessGroup& group, const at::Tensor& data) {
        std::vector<int> ranks(static_cast<size_t>(group.size()));
        std::iota(ranks.begin(), ranks.end(), 0);
        const ProcessGroup rows = group.subgroup(ranks, "rows", {.timeout = seconds(4)});
        rows.all_reduce(data);
        device_of(rows).synchronize();
        if (rows.rank() != 1) rows.all_reduce_async(data).wait();
        for (int i = 0; i < 3; ++i) group.all_reduce_async(data).wait();
        device_of(group).synchronize();
        EXPECT_TRUE(device_of(rows).is_aborted_soon());
        group.barrier("next");
      });
  expect_told(ends, {"rank 1 has not come to all_reduce(sum) of float32[4] at ",
                     ", call 2 of group \"rows\", for which the devices of " + the_others()});
  for (const RankEnd& end : ends)
    EXPECT_EQ(end.output.find("of group \"world\""), std::string::npos) << end.output;
}

TEST_P(DeviceStallTest, ASlowRankIsWaitedFor) {
  const auto ends = queued_ranks(world_size(), seconds(20),
                                 [](const ProcessGroup& group, const at::Tensor& data) {
                                   // Longer than it takes until ranks compare.
                                   if (group.rank() == 1) std::this_thread::sleep_for(seconds(5));
                                   group.all_reduce_async(data).wait();
                                   group.broadcast_async(data).wait();
                                   device_of(group).synchronize();
                                   group.barrier("next");
                                 });
  expect_no_alarm(ends);
}

// The main group's collectives are the host's; those of a sub-group are a device's.
TEST(DeviceSubgroupTest, ALostRankEndsTheWaitForADevice) {
  const auto ends = queued_ranks(
      3, seconds(60),
      [](const ProcessGroup& group, const at::Tensor& data) {
        const ProcessGroup cards = group.subgroup({1, 2}, "cards", {.backend = "queued"});
        if (cards) cards.all_reduce(data);
        if (group.rank() == 1) {
          group.store().wait({"waits"}, seconds(60));
          ::kill(::getpid(), SIGKILL);
        }
        if (group.rank() == 0) {
          group.store().wait({"told"}, seconds(60));
        } else {
          cards.all_reduce_async(data).wait();
          group.store().set("waits", "");
          device_of(cards).synchronize();
          group.store().set("told", "");
        }
        group.barrier("next");
      },
      "auto");
  EXPECT_EQ(ends[1].exit_code, 128 + SIGKILL);
  for (const size_t rank : {0, 2}) {
    expect_lost_peer(ends[rank]);
    EXPECT_NE(ends[rank].output.find("lost rank 1 in "), std::string::npos) << ends[rank].output;
  }
}

}  // namespace device_stall_test
}  // namespace cohort::test
