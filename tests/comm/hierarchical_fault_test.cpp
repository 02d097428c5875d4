// SPDX-License-Identifier: Apache-2.0
// Ranks that are lost, late or aborted over the backend hierarchical, and two hosts on a cable.
#include <ATen/ATen.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/comm/process_group.h"

#include "tests/support/namespaces.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace cohort::comm {
namespace hierarchical_fault_test {

// Ranks 0 and 2 are on one host, 1 and 3 on the other: `body` on each.
std::vector<test::RankEnd> ends_on_two_hosts(
    const std::function<void(const ProcessGroup&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(4)) {
  setenv("COHORT_TEST_HOSTS", "2", 1);
  const auto ends = test::run_ranks(4, body, {.backend = "hierarchical", .timeout = timeout});
  unsetenv("COHORT_TEST_HOSTS");
  return ends;
}

void expect_all_name(const std::vector<test::RankEnd>& ends, int lost, const std::string& text) {
  for (int rank = 0; rank < std::ssize(ends); ++rank) {
    if (rank == lost) continue;
    const auto& end = ends[static_cast<size_t>(rank)];
    EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
    EXPECT_NE(end.output.find(text), std::string::npos) << end.output;
  }
}

// In the middle of large tensors. The leader of the other host, then the rank that it leads.
TEST(HierarchicalFaultTest, SurvivorsNameALostLeader) {
  expect_all_name(ends_on_two_hosts([](const ProcessGroup& group) {
                    const at::Tensor x = at::ones({1 << 21});
                    for (int i = 0; i < 1000; ++i) {
                      if (i == 3 && group.rank() == 1) kill(getpid(), SIGKILL);
                      group.all_reduce(x, ReduceOp::kMax);
                    }
                  }),
                  1, "lost rank 1");
}
TEST(HierarchicalFaultTest, SurvivorsNameALostFollower) {
  const auto ends = ends_on_two_hosts([](const ProcessGroup& group) {
    const at::Tensor x = at::ones({1 << 21});
    for (int i = 0; i < 1000; ++i) {
      if (i == 3 && group.rank() == 3) kill(getpid(), SIGKILL);
      group.all_reduce(x, ReduceOp::kMax);
    }
  });
  expect_all_name(ends, 3, "lost rank 3");
  for (const auto& end : ends) {
    for (const std::string other : {"rank 0", "rank 1", "rank 2"})
      EXPECT_EQ(end.output.find(other + " has ended"), std::string::npos) << end.output;
  }
  // Its leader shares memory with it.
  EXPECT_NE(ends[1].output.find("rank 3 has ended"), std::string::npos) << ends[1].output;
}

// Ranks of one host are numbered as in the group, in everything that the memory's side says.
TEST(HierarchicalFaultTest, RanksOfAHostAreNumberedAsInTheGroup) {
  const auto ends = ends_on_two_hosts([](const ProcessGroup& group) {
    group.barrier("begin");
    if (group.rank() % 2 == 0) return;
    std::vector<at::Tensor> tensors{at::ones({group.rank()})};
    try {
      group.c10d_group().allreduce(tensors)->wait();
    } catch (const std::exception& error) {
      throw std::runtime_error(one_line(error));
    }
  });
  EXPECT_NE(ends[1].output.find("rank 3 calls REDUCE of 3"), std::string::npos) << ends[1].output;
  EXPECT_NE(ends[3].output.find("rank 1 calls REDUCE of 1"), std::string::npos) << ends[3].output;
}

TEST(HierarchicalFaultTest, ARankThatDoesNotComeIsNamedAtTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  expect_all_name(ends_on_two_hosts([](const ProcessGroup& group) {
                    group.all_reduce_sum(1);
                    if (group.rank() == 3) std::this_thread::sleep_for(std::chrono::seconds(12));
                    group.all_reduce_sum(1);
                  }),
                  3, "rank 3 has not come");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
}

// Rank 0 never calls, and lives until the others have ended: only the abort can end their wait.
TEST(HierarchicalFaultTest, AnAbortEndsWhatWaits) {
  const auto body = [](const ProcessGroup& group) {
    using std::chrono::steady_clock;
    const at::Tensor x = at::ones({1 << 20});
    group.all_reduce_async(x).wait();
    std::vector<at::Tensor> tensors{x};
    const auto begin = steady_clock::now();
    const auto await_three = [&](const char* what) {
      while (group.store().add(what, 0) < 3 &&
             steady_clock::now() - begin < std::chrono::seconds(60))
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    if (group.rank() == 0) {
      await_three("ended");
    } else {
      const auto work = group.c10d_group().allreduce(tensors);
      group.store().add("waiting", 1);
      await_three("waiting");
      group.c10d_group().getBackend(at::kCPU)->abort();
      EXPECT_THROW(work->wait(), std::exception);
      group.store().add("ended", 1);
    }
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(30)) << "their timeout is 60 s";
    if (!testing::Test::HasFailure())
      throw std::runtime_error("the end of rank " + std::to_string(group.rank()));
  };
  const auto ends = ends_on_two_hosts(body, std::chrono::seconds(60));
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].exit_code, kExitFailure) << ends[rank].output;
    EXPECT_NE(ends[rank].output.find("the end of rank " + std::to_string(rank)), std::string::npos)
        << ends[rank].output;
  }
}

// As many elements, or bytes, in other tensors, on the ranks of one host and of the other. Nothing
// compares them here, so they wait for each other.
void call_list(const std::vector<at::Tensor>& own, const ProcessGroup& group) {
  std::vector<at::Tensor> list;
  for (const at::Tensor& tensor : own) list.push_back(tensor.clone());
  group.run_collective("a list", [&] { group.c10d_group().allreduce_coalesced(list)->wait(); });
}
void expect_lists_time_out(
    const std::function<std::vector<at::Tensor>(int host)>& tensors_of_host) {
  const auto ends = ends_on_two_hosts([&](const ProcessGroup& group) {
    group.barrier("begin");
    call_list(tensors_of_host(group.rank() % 2), group);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
    EXPECT_NE(end.output.find("a list"), std::string::npos) << end.output;
  }
}
TEST(HierarchicalFaultTest, ListsOfOtherLengthsOnAnotherHostAreNotSummed) {
  expect_lists_time_out([](int host) {
    const int64_t first = host == 0 ? 5 : 3;
    return std::vector<at::Tensor>{at::ones({first}), at::ones({8 - first})};
  });
}
TEST(HierarchicalFaultTest, ListsOfOtherDtypesOnAnotherHostAreNotSummed) {
  expect_lists_time_out([](int host) {
    return std::vector<at::Tensor>{at::ones({8}, host == 0 ? at::kFloat : at::kInt)};
  });
}

// Two hosts of two ranks each, in network namespaces: what crosses the cable, with all headers.
TEST(HierarchicalFaultTest, TwoHostsOnACable) {
  const auto sent_over_cable = [] {
    std::ifstream devices("/proc/self/net/dev");
    std::string word;
    while (devices >> word && word != "eth0:") {
    }
    int64_t number = 0;
    for (int column = 0; column < 9; ++column) devices >> number;
    return number;
  };
  const auto body = [&](const ProcessGroup& group) {
    EXPECT_EQ(group.backend(), "hierarchical");
    const at::Tensor x = at::full({1 << 22}, group.rank() + 1.0);
    group.barrier("begin");
    const int64_t before = sent_over_cable();
    group.barrier("measure");
    group.all_reduce(x);
    group.barrier("measured");
    const auto sent = static_cast<double>(sent_over_cable() - before);
    group.barrier("end");
    EXPECT_TRUE(at::equal(x, at::full_like(x, 10)));
    EXPECT_GE(sent, x.nbytes());
    EXPECT_LT(sent,
              1.1 * static_cast<double>(x.nbytes()));  // 66 bytes of headers a packet of 1,514
    // Sums whose bits depend on the order: inside the hosts, then between them.
    const auto term = [](int rank) {
      at::manual_seed(static_cast<uint64_t>(rank) + 1);
      return at::randn({100003});
    };
    const at::Tensor own = term(group.rank());
    const at::Tensor sum = (term(0) + term(1)) + (term(2) + term(3));
    ASSERT_FALSE(at::equal(sum, ((term(0) + term(1)) + term(2)) + term(3)));
    EXPECT_TRUE(at::equal(group.all_reduce(own.clone()), sum));
    at::Tensor part = at::empty_like(own);
    group.reduce_scatter(part, at::cat({own, own, own, own}));
    EXPECT_TRUE(at::equal(part, sum));
    at::Tensor all = at::empty({4 * own.numel()});
    group.all_gather_into(all, own);
    EXPECT_TRUE(at::equal(all, at::cat({term(0), term(1), term(2), term(3)})));
    EXPECT_TRUE(at::equal(group.broadcast(own.clone(), 2), term(2)));
  };
  if (std::getenv("COHORT_TEST_RANK") != nullptr) test::ranks(4, body, {.backend = "auto"});
  const test::Namespaces hosts(2);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::string script;
  for (int rank = 0; rank < 4; ++rank) {
    const std::string number = std::to_string(rank);
    for (const std::string& word :
         hosts.on(rank / 2, {"env", "COHORT_TEST_RANK=" + number, "RANK=" + number, "WORLD_SIZE=4",
                             "LOCAL_RANK=" + std::to_string(rank % 2), "LOCAL_WORLD_SIZE=2",
                             "MASTER_ADDR=" + test::Namespaces::address(0), "MASTER_PORT=29500",
                             "OMP_NUM_THREADS=1", program,
                             "--gtest_filter=HierarchicalFaultTest.TwoHostsOnACable"}))
      script += word + " ";
    script += "& all=\"$all $!\"; ";
  }
  const test::Ended ended = test::shell(script + "for one in $all; do wait $one || exit 1; done");
  EXPECT_EQ(ended.code, 0) << ended.output;
}

}  // namespace hierarchical_fault_test
}  // namespace cohort::comm
