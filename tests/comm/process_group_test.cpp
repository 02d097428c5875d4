// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/process_group.h"

#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <regex>
#include <sched.h>
#include <signal.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <torch/types.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/comm/listen.h"

#include "tests/support/eventually.h"
#include "tests/support/free_port.h"
#include "tests/support/loopback.h"
#include "tests/support/message_of.h"
#include "tests/support/named_in_time.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace cohort::comm {
namespace process_group_test {

TEST(ProcessGroupTest, CollectivesGiveEveryRankTheSame) {
  test::ranks(3, [](const ProcessGroup& group) {
    at::Tensor sum = at::full({5}, group.rank() + 1.0, at::kDouble);
    group.all_reduce(sum);
    EXPECT_EQ(sum.sum().item<double>(), 30);
    at::Tensor highest = at::full({1}, group.rank(), at::kLong);
    group.all_reduce(highest, ReduceOp::kMax);
    EXPECT_EQ(highest.item<int64_t>(), 2);
    EXPECT_EQ(group.all_reduce_sum(group.rank()), 3);
    EXPECT_EQ(group.broadcast_object(group.rank() == 1 ? "from one" : "other", 1), "from one");
    EXPECT_EQ(group.all_gather_object(std::string(static_cast<size_t>(group.rank()), 'x')),
              (std::vector<std::string>{"", "x", "xx"}));
    group.barrier("end");
  });
}

TEST(ProcessGroupTest, WithoutADeviceRanksComputeOnTheCpu) {
  test::ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(group.device(), at::Device(at::kCPU));
    const at::Tensor sum = group.all_reduce(at::ones({3}, group.device()));
    EXPECT_TRUE(sum.equal(at::full({3}, 2.0)));
    EXPECT_EQ(group.subgroup({0, 1}, "both").device(), group.device());
  });
  EXPECT_THROW((void)ProcessGroup().device(), c10::ValueError);
}

TEST(ProcessGroupTest, ProgramsThatRank0StartsDoNotInheritTheStoresSocket) {
  test::ranks(2, [](const ProcessGroup& group) {
    const char* fd = std::getenv("COHORT_STORE_FD");
    ASSERT_EQ(fd != nullptr, group.rank() == 0);
    if (fd != nullptr) {
      EXPECT_EQ(fcntl(std::atoi(fd), F_GETFD), FD_CLOEXEC);
    }
    group.barrier("end");
  });
}

// Threads and open files of this process.
int64_t num_held() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/task"), {}) +
         std::distance(directory_iterator("/proc/self/fd"), {});
}

// Over Gloo, each of whose groups has threads and sockets of its own.
TEST(ProcessGroupTest, GroupsThatAreGoneLeaveNoThreadsAndFiles) {
  test::ranks(2,
              [](const ProcessGroup& group) {
                const auto make_and_drop = [&] {
                  EXPECT_EQ(group.subgroup({0, 1}, "pair").all_reduce_sum(1), 2);
                };
                make_and_drop();
                const int64_t before = num_held();
                for (int i = 0; i < 5; ++i) make_and_drop();
                // A thread that was joined is listed for a moment more.
                EXPECT_TRUE(test::eventually([&] { return num_held() <= before; }))
                    << num_held() << " beside " << before;
              },
              {.backend = "gloo"});
}

// Otherwise Gloo's thread, woken by a message, would preempt the thread that sends it.
TEST(ProcessGroupTest, GloosThreadsTakeNoCoreFromOthers) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto batch_threads = [] {
      int count = 0;
      for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task"))
        count += ::sched_getscheduler(std::stoi(thread.path().filename())) == SCHED_BATCH;
      return count;
    };
    bool may_change = false;
    std::thread([&] {
      const sched_param none{};
      may_change = ::sched_setscheduler(0, SCHED_BATCH, &none) == 0;
    }).join();
    const int policy = ::sched_getscheduler(0);
    const bool changes = may_change && policy == SCHED_OTHER;
    // A joined thread is listed for a moment more.
    EXPECT_TRUE(test::eventually([&] { return !changes || batch_threads() == 0; }));
    const int before = batch_threads();
    const ProcessGroup gloo = group.subgroup({0, 1}, "gloo", {.backend = "gloo"});
    // A sandbox may forbid another policy, and the test may have been started with one.
    EXPECT_TRUE(test::eventually([&] { return !changes || batch_threads() == before + 1; }));
    EXPECT_EQ(::sched_getscheduler(0), policy) << "the program's own thread";
    group.barrier("end");
  });
}

// A program that forks and returns, with groups on the way.
TEST(ProcessGroupTest, AChildThatForksMayDestroyItsCopies) {
  const auto end_of_child = [](std::vector<ProcessGroup>& groups) {
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGSEGV, SIG_DFL);
      groups.clear();
      _exit(3);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  };
  std::vector<ProcessGroup> alone{ProcessGroup(RankInfo{})};
  EXPECT_EQ(end_of_child(alone), 3);
  test::ranks(2, [&](const ProcessGroup& group) {
    std::vector<ProcessGroup> groups{ProcessGroup(group.rank_info())};
    groups.push_back(groups[0].subgroup({0, 1}, "pair"));
    EXPECT_EQ(end_of_child(groups), 3);
    for (const ProcessGroup& each : groups) EXPECT_EQ(each.all_reduce_sum(1), 2);
  });
}

// As Python's subprocess does by default, and sudo.
TEST(ProcessGroupTest, AProgramThatClosesTheLaunchersSocketIsNamed) {
  const RankInfo info{.rank = 0,
                      .world_size = 2,
                      .master_addr = "127.0.0.1",
                      .master_port = 29'500,
                      .store_fd = 900};
  const std::string text = test::message_of<ConfigError>([&] { const ProcessGroup group(info); });
  EXPECT_NE(text.find("COHORT_STORE_FD=900: expected the launcher's socket, got a closed"),
            std::string::npos)
      << text;
}

// Gloo writes to the sockets of ranks that may have just ended.
TEST(ProcessGroupTest, AWriteToAVanishedPeerIsAnErrorAndNoDeath) {
  test::ranks(2, [](const ProcessGroup& group) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    ::close(sockets[1]);
    EXPECT_EQ(::write(sockets[0], "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
    ::close(sockets[0]);
    group.barrier("end");
  });
}

TEST(ProcessGroupTest, OneProcessIsAGroup) {
  ProcessGroup group(RankInfo{});
  EXPECT_EQ(group.all_reduce_sum(4), 4);
  group.close();
  EXPECT_THROW(group.all_reduce_sum(4), c10::ValueError);
}

TEST(ProcessGroupTest, AWorkKeepsItsGroup) {
  ProcessGroup group(RankInfo{});
  at::Tensor x = at::ones({2});
  at::Tensor all = at::zeros({2});
  Work sum = group.all_reduce_async(x);
  Work gathered = group.all_gather_into_async(all, x, "rows");
  gathered.wait();
  group = {};
  gathered.wait();
  sum.wait();
  EXPECT_TRUE(at::equal(all, at::ones({2})));
}

TEST(ProcessGroupTest, WhatTheCallersCodeThrowsInAGuardIsNoLostPeer) {
  ProcessGroup group(RankInfo{});
  const std::string text = "/home/me/gloo/reader.cpp: no such line";
  try {
    group.translate_errors("backward", [&] { throw std::runtime_error(text); });
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_EQ(error.what(), text);
    EXPECT_EQ(dynamic_cast<const PeerError*>(&error), nullptr);
  }
  EXPECT_EQ(group.all_reduce_sum(4), 4) << "the group continues";
}

TEST(ProcessGroupTest, AfterCloseEveryOperationIsRefused) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& group) {
    group.close();
    at::Tensor one = at::ones({2});
    at::Tensor two = at::ones({4});
    const std::vector<std::function<void()>> operations{
        [&] { group.all_reduce(one); },
        [&] { group.all_reduce_async(one).wait(); },
        [&] { group.all_reduce_sum(1); },
        [&] { group.reduce(one); },
        [&] { group.broadcast(one); },
        [&] { group.all_gather(one); },
        [&] { group.all_gather_into(two, one); },
        [&] { group.all_gather_into_async(two, one).wait(); },
        [&] { group.gather(one); },
        [&] { group.scatter(one, {}); },
        [&] { group.reduce_scatter(one, two); },
        [&] { group.reduce_scatter_async(one, two).wait(); },
        [&] { group.all_to_all(one, two); },
        [&] { group.send(one, 1); },
        [&] { group.recv(one, 1); },
        [&] { group.broadcast_object("x"); },
        [&] { group.all_gather_object("x"); },
        [&] { group.gather_object("x"); },
        [&] { group.barrier("x"); },
        [&] { group.subgroup({0}, "x"); },
        [&] { group.translate_errors("x", [] {}); },
        [&] { group.c10d_group(); },
    };
    for (size_t i = 0; i < operations.size(); ++i) {
      try {
        operations[i]();
        ADD_FAILURE() << "operation " << i << " threw nothing";
      } catch (const c10::ValueError& error) {
        EXPECT_NE(std::string(error.what()).find("\"world\" was closed"), std::string::npos)
            << error.what();
      }
    }
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 1) << end.output << "a second close, by the harness";
    EXPECT_EQ(end.output.find("Failure"), std::string::npos) << end.output;
  }
}

TEST(ProcessGroupTest, AnUnknownBackendIsNamed) {
  try {
    ProcessGroup group(RankInfo{}, {.backend = "nonesuch"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error).find("backend \"nonesuch\" is unknown: there is "), 0u)
        << one_line(error);
  }
}

TEST(ProcessGroupTest, APortInUseIsNamed) {
  const int fd = listen_on(0);
  const int port = port_of(fd);
  try {
    ProcessGroup group({.rank = 0,
                        .world_size = 2,
                        .local_rank = 0,
                        .local_world_size = 2,
                        .master_addr = "127.0.0.1",
                        .master_port = port,
                        .store_fd = {},
                        .source = "test"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error),
              "port " + std::to_string(port) + " cannot be listened on: Address already in use");
  }
  ::close(fd);
}

// In a process of its own: the whole of its stderr is one line.
TEST(ProcessGroupTest, AnUnreachableMasterIsNamedWithinTheTimeout) {
  if (std::getenv("RANK") != nullptr) {
    std::exit(run_program("test", [] {
      ProcessGroup group(rank_info_from_environment(),
                         {.rendezvous_timeout = std::chrono::seconds(2)});
      return kExitOk;
    }));
  }
  const std::string port = std::to_string(test::free_port());  // Nobody listens there.
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const test::Ended ended =
      test::shell("env RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port + " " + self +
                  " --gtest_filter=ProcessGroupTest.AnUnreachableMasterIsNamedWithinTheTimeout"
                  " 2>&1 >/dev/null");
  EXPECT_EQ(ended.code, 3) << ended.output;
  std::smatch match;
  ASSERT_TRUE(std::regex_match(
      ended.output, match,
      std::regex("\\[rank 1/2\\] test: error: lost a peer in rendezvous at 127.0.0.1:" + port +
                 " after (\\d+) ms on rank 1: nobody answers there: Connection refused\n")))
      << ended.output;
  EXPECT_GE(std::stoi(match[1]), 2000);
  EXPECT_LT(std::stoi(match[1]), 15'000) << "300 s by itself";
}

TEST(ProcessGroupTest, AHostNameThatDoesNotResolveIsNamed) {
  try {
    local_address_towards("no-such-host.invalid", 80, std::chrono::steady_clock::now());
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find("MASTER_ADDR=no-such-host.invalid does not resolve"),
              std::string::npos);
  }
}

// From the call that fails, which begins where the lost rank ends, to its error: a watch looks at
// the store every 250 ms, at the lost process every 50 ms, and the others poll for the report every
// 20 ms. Four times the sum, for a busy machine; a rank that is silent has 2,000 ms.
constexpr int kMostMsUntilNamed = 4 * (250 + 50 + 20);

// One rank kills itself between collectives; the others must name it and leave, long before the
// timeout of ten minutes. Returns how these ended.
std::vector<test::RankEnd> survivors_that_name(int victim) {
  auto ends = test::run_ranks(3, [victim](const ProcessGroup& group) {
    at::Tensor x = at::ones({1 << 16});
    for (int i = 0; i < 1000000; ++i) {
      if (i == 20 && group.rank() == victim) kill(getpid(), SIGKILL);
      test::time_error_of([&] { group.all_reduce(x); });
      x.fill_(1);
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    const auto& end = ends[static_cast<size_t>(rank)];
    EXPECT_EQ(end.exit_code, rank == victim ? 137 : 3) << end.output;
    if (rank == victim) continue;
    EXPECT_NE(end.output.find("lost rank " + std::to_string(victim) + " in all_reduce(sum) #"),
              std::string::npos)
        << "rank " << rank << " wrote: " << end.output;
    // By what it is known: a rank that stands still does not answer either.
    const std::string how = victim == 0 ? ": its store " : ": its process has ended (";
    EXPECT_NE(end.output.find(how), std::string::npos) << end.output;
  }
  ends.erase(ends.begin() + victim);
  return ends;
}

// The last collective has gone well, but one rank never says good-bye.
TEST(ProcessGroupFaultTest, ClosingWithoutAPeerNamesIt) {
  test::expect_named_within(kMostMsUntilNamed, [] {
    const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
      group.all_reduce_sum(1);
      if (group.rank() == 2) kill(getpid(), SIGKILL);
      test::time_error_of([&] { group.close(); });
    });
    return test::survivors_that_wrote("lost rank 2 in barrier \"close\"", ends);
  });
}

TEST(ProcessGroupFaultTest, SurvivorsNameAKilledRank) {
  test::expect_named_within(kMostMsUntilNamed, [] { return survivors_that_name(1); });
}
TEST(ProcessGroupFaultTest, SurvivorsNameAKilledStoreHost) {
  test::expect_named_within(kMostMsUntilNamed, [] { return survivors_that_name(0); });
}

// gRPC's channels, for one, connect whenever they like.
TEST(ProcessGroupFaultTest, ConnectionsOfOtherThreadsStayOpen) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& group) {
    std::vector<test::Loopback> others;
    std::vector<ProcessGroup> groups;
    {
      const std::jthread thread([&](const std::stop_token& stop) {
        do others.emplace_back();
        while (!stop.stop_requested() && others.size() < 200);
      });
      for (int i = 0; i < 5; ++i) groups.push_back(group.subgroup({0, 1}, "pair"));
    }
    if (group.rank() == 1) kill(getpid(), SIGKILL);
    EXPECT_THROW(groups.back().all_reduce_sum(1), PeerError);
    size_t num_open = 0;
    for (const test::Loopback& other : others) num_open += other.is_open() ? 1 : 0;
    EXPECT_EQ(num_open, others.size());
    std::printf("%zu stay open\n", num_open);
    std::fflush(stdout);
    throw std::runtime_error("end without good-bye");
  });
  EXPECT_TRUE(std::regex_search(ends[0].output, std::regex("[1-9][0-9]* stay open")))
      << ends[0].output;
  EXPECT_EQ(ends[0].output.find("Failure"), std::string::npos) << ends[0].output;
}

}  // namespace process_group_test
}  // namespace cohort::comm
