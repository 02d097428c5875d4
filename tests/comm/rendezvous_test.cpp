// SPDX-License-Identifier: Apache-2.0
// How ranks find each other, and what they report when they do not.
#include "cohort/comm/rendezvous.h"

#include <ATen/ATen.h>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/comm/connections.h"
#include "cohort/comm/listen.h"
#include "cohort/comm/process_group.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/free_port.h"
#include "tests/support/shell.h"

namespace cohort::comm {
namespace rendezvous_test {

using cohort::test::free_port;
using std::chrono::milliseconds;
using std::chrono::seconds;

RankInfo info_of(int rank, int world_size, int port) {
  RankInfo info;
  info.rank = rank;
  info.world_size = world_size;
  info.local_rank = rank;
  info.local_world_size = world_size;
  info.master_addr = "127.0.0.1";
  info.master_port = port;
  info.source = "test";
  return info;
}

RankInfo at_file(int rank, int world_size, const std::string& path) {
  RankInfo info = info_of(rank, world_size, 0);
  info.master_addr.clear();
  info.store_file = path;
  return info;
}

// Lets each rank join, one thread each; returns what each got: "joined" or its error.
std::vector<std::string> join_all(const std::vector<RankInfo>& infos,
                                  milliseconds timeout = seconds(30)) {
  std::vector<std::string> results(infos.size());
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < infos.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        ProcessGroup group(infos[i], {.rendezvous_timeout = timeout, .timeout = seconds(30)});
        EXPECT_EQ(group.all_reduce_sum(1), infos[i].world_size);
        group.close();
        results[i] = "joined";
      } catch (const std::exception& error) {
        results[i] = one_line(error);
      }
    });
  }
  threads.clear();
  return results;
}

void expect_each_says(const std::vector<std::string>& results, const std::string& text) {
  for (const std::string& result : results)
    EXPECT_NE(result.find(text), std::string::npos) << result;
}

cpu_set_t cores(std::initializer_list<int> numbers) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int number : numbers) CPU_SET(number, &set);
  return set;
}

TEST(HasCoreEachTest, CountsAllRanksThatMayUseTheirCores) {
  const cpu_set_t both = cores({0, 1}), elsewhere = cores({});
  EXPECT_TRUE(has_core_each({both, both}, {0, 1}));
  EXPECT_TRUE(has_core_each({both, both, elsewhere, elsewhere}, {0, 1}));
  EXPECT_FALSE(has_core_each({both, both, both}, {0, 1, 2}));
  EXPECT_FALSE(has_core_each({both, both, both, both}, {0, 2})) << "others use them, too";
  EXPECT_TRUE(has_core_each({cores({0}), cores({1})}, {0, 1}));
  EXPECT_TRUE(has_core_each({cores({0}), cores({1}), cores({2})}, {0, 2}));
  EXPECT_FALSE(has_core_each({cores({0}), cores({0})}, {0, 1}));
  const cpu_set_t other = cores({2, 3});
  EXPECT_TRUE(has_core_each({both, other, both, other}, {0, 2})) << "the others have their own";
  EXPECT_FALSE(has_core_each({elsewhere, elsewhere}, {0, 1})) << "not known";
}

TEST(RendezvousTest, RanksJoinByTcp) {
  const int port = free_port();
  expect_each_says(join_all({info_of(0, 3, port), info_of(1, 3, port), info_of(2, 3, port)}),
                   "joined");
}

// Whom rank 0 serves by the loopback it serves by that alone.
TEST(RendezvousTest, AStoreOfTheLoopbackListensThereOnly) {
  const auto bound = [](const std::string& host) {
    const Fd fd(listen_on(0, host));
    return listening_sockets().at(fd.get());
  };
  EXPECT_TRUE(bound("127.0.0.1").starts_with("127.0.0.1:"));
  EXPECT_TRUE(bound("localhost").starts_with("127.0.0.1:"));
  EXPECT_TRUE(bound("127.0.1.1").starts_with("127.0.1.1:"));
  for (const char* host : {"", "node0", "10.0.0.1"})
    EXPECT_TRUE(bound(host).starts_with(":::") || bound(host).starts_with("0.0.0.0:"))
        << bound(host);
  for (const char* host : {"127.0.0.1", "localhost", "127.0.1.1"}) {
    const int port = free_port();
    std::vector<RankInfo> infos;
    for (int rank = 0; rank < 2; ++rank) {
      infos.push_back(info_of(rank, 2, port));
      infos.back().master_addr = host;
    }
    expect_each_says(join_all(infos), "joined");
  }
}

TEST(RendezvousTest, WhoSharesAHostIsFoundWhereNobodySaysIt) {
  const int port = free_port();
  std::vector<RankInfo> found(3);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        RankInfo info = info_of(rank, 3, port);
        info.local_rank = 0;
        info.local_world_size = 1;
        info.finds_host = true;
        ProcessGroup group(info, {.rendezvous_timeout = seconds(30), .timeout = seconds(30)});
        found[static_cast<size_t>(rank)] = group.rank_info();
        group.close();
      });
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    const RankInfo& info = found[static_cast<size_t>(rank)];
    EXPECT_EQ(info.local_rank, rank);
    EXPECT_EQ(info.local_world_size, 3);
    EXPECT_FALSE(info.finds_host);
  }
}

// The last process removes it when it ends (tests/start/ways_to_start.py).
TEST(RendezvousTest, RanksJoinByFileAndKeepItForTheNextGroup) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "rendezvous";
  expect_each_says(join_all({at_file(0, 3, path), at_file(1, 3, path), at_file(2, 3, path)}),
                   "joined");
  EXPECT_TRUE(std::filesystem::exists(path));
  expect_each_says(join_all({at_file(0, 3, path), at_file(1, 3, path), at_file(2, 3, path)}),
                   "joined");
}

TEST(RendezvousTest, AMissingRankIsNamedOnEveryRank) {
  const int port = free_port();
  const auto start = std::chrono::steady_clock::now();
  const auto results =
      join_all({info_of(0, 4, port), info_of(1, 4, port), info_of(3, 4, port)}, seconds(5));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20));
  expect_each_says(results, "lost rank 2 in rendezvous at 127.0.0.1:" + std::to_string(port));
  expect_each_says(results, "3 of 4 ranks have come");
}

TEST(RendezvousTest, TwoProcessesWithOneNumberAreNamedOnEveryRank) {
  const int port = free_port();
  const auto results = join_all({info_of(0, 3, port), info_of(1, 3, port), info_of(1, 3, port)});
  expect_each_says(results, "two processes are rank 1: pid ");
}

// Makes `count` groups of three ranks at one address, each with its own sums, all of them alive
// until the last one has ended if `side_by_side`.
void make_groups(const std::function<RankInfo(int rank)>& info, int count, bool side_by_side) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        std::vector<ProcessGroup> groups;
        for (int i = 0; i < count; ++i) {
          if (!side_by_side) groups.clear();
          groups.emplace_back(info(rank), ProcessGroupOptions{.rendezvous_timeout = seconds(60),
                                                              .timeout = seconds(60)});
          EXPECT_EQ(groups.back().all_reduce_sum(i), 3 * i);
        }
        for (auto& group : groups) EXPECT_EQ(group.all_reduce_sum(rank), 3);
        for (auto& group : groups) group.close();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << one_line(error);
      }
    });
  }
}

TEST(RendezvousTest, GroupsFollowEachOtherAndStandSideBySide) {
  for (const bool side_by_side : {false, true}) {
    const int port = free_port();
    const int count = side_by_side ? 3 : 10;
    make_groups([port](int rank) { return info_of(rank, 3, port); }, count, side_by_side);
    // The same address once more: its earlier groups are over.
    make_groups([port](int rank) { return info_of(rank, 3, port); }, 1, side_by_side);
    const TemporaryFolder folder;
    make_groups([&](int rank) { return at_file(rank, 3, folder.path() / "rendezvous"); }, count,
                side_by_side);
  }
}

TEST(RendezvousTest, ARankThatGaveUpJoinsOneThatComesLater) {
  const int port = free_port();
  expect_each_says(join_all({info_of(0, 2, port)}, seconds(1)), "1 of 2 ranks have come");
  std::vector<std::string> early, late;
  {
    const std::jthread first([&] { early = join_all({info_of(0, 2, port)}); });
    std::this_thread::sleep_for(milliseconds(300));
    late = join_all({info_of(1, 2, port)});
  }
  expect_each_says(early, "joined");
  expect_each_says(late, "joined");
}

TEST(RendezvousTest, ARankThatComesAfterOneGaveUpMeetsItsNextTry) {
  const int port = free_port();
  expect_each_says(join_all({info_of(0, 2, port)}, seconds(1)), "1 of 2 ranks have come");
  std::vector<std::string> early, late;
  {
    const std::jthread second([&] { late = join_all({info_of(1, 2, port)}, seconds(20)); });
    std::this_thread::sleep_for(milliseconds(300));
    early = join_all({info_of(0, 2, port)}, seconds(20));
  }
  expect_each_says(early, "joined");
  expect_each_says(late, "joined");
}

// Such as a worker of a round before, or of another job with the same port.
TEST(RendezvousTest, RanksOfAnotherJobHurtNobody) {
  const int port = free_port();
  std::vector<RankInfo> infos;
  for (int rank = 0; rank < 2; ++rank) {
    infos.push_back(info_of(rank, 2, port));
    infos.back().job = "job.2";
  }
  RankInfo straggler = info_of(1, 2, port);
  straggler.job = "job.1";
  std::vector<std::string> lonely;
  {
    const std::jthread thread([&] { lonely = join_all({straggler}, seconds(8)); });
    std::this_thread::sleep_for(milliseconds(200));
    expect_each_says(join_all(infos), "joined");
  }
  expect_each_says(lonely, "1 of 2 ranks have come");
}

// Rank 1 of three processes, which rank 0 outlives: the first is killed, the second replaces it, a
// third is one too many.
TEST(RendezvousTest, ANewProcessTakesTheOneThatEndedsPlace) {
  const ProcessGroupOptions options{.rendezvous_timeout = seconds(60), .timeout = seconds(60)};
  if (const char* port = std::getenv("COHORT_TEST_STORE_PORT")) {
    try {
      ProcessGroup group(info_of(1, 2, std::atoi(port)), options);
      if (group.all_reduce_sum(1) == 2) kill(getpid(), SIGKILL);
      std::printf("the sum was %d\n", static_cast<int>(group.all_reduce_sum(1)));
      group.close();
    } catch (const std::exception& error) {
      std::printf("%s\n", one_line(error).c_str());
    }
    std::fflush(stdout);
    _exit(0);
  }
  const int port = free_port();
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string rank_1 =
      "env COHORT_TEST_STORE_PORT=" + std::to_string(port) + " " + self +
      " --gtest_filter=RendezvousTest.ANewProcessTakesTheOneThatEndedsPlace 2>&1";
  auto first = std::async(std::launch::async, [&] { return test::shell(rank_1); });
  {
    ProcessGroup group(info_of(0, 2, port), options);
    EXPECT_EQ(group.all_reduce_sum(1), 2);
    EXPECT_THROW(group.all_reduce_sum(1), PeerError);
  }
  first.get();
  auto second = std::async(std::launch::async, [&] { return test::shell(rank_1); });
  ProcessGroup group(info_of(0, 2, port), options);
  const test::Ended third = test::shell(rank_1);
  EXPECT_NE(third.output.find("two processes are rank 1: pid "), std::string::npos) << third.output;
  EXPECT_EQ(group.all_reduce_sum(9), 10);
  EXPECT_EQ(group.all_reduce_sum(9), 10);
  group.close();
  EXPECT_NE(second.get().output.find("the sum was 10"), std::string::npos);
}

TEST(RendezvousTest, DifferentWorldSizesAreNamedOnEveryRank) {
  const int port = free_port();
  const auto results = join_all({info_of(0, 3, port), info_of(1, 4, port)});
  expect_each_says(results, "world size 3, backend auto");
  expect_each_says(results, "world size 4, backend auto");
}

TEST(RendezvousTest, AHostThatDoesNotResolveIsNamed) {
  RankInfo lost = info_of(1, 2, 80);
  lost.master_addr = "no-such-host.invalid";
  expect_each_says(join_all({lost}, seconds(1)),
                   "MASTER_ADDR=no-such-host.invalid does not resolve");
  try {
    ProcessGroup group(lost, {.rendezvous_timeout = seconds(1), .interface = "lo"});
    FAIL();
  } catch (const ConfigError& error) {
    expect_each_says({one_line(error)}, "MASTER_ADDR=no-such-host.invalid does not resolve");
  }
}

TEST(RendezvousTest, AHostThatComesLaterIsWaitedFor) {
  const int fd = listen_on(0);
  const int port = port_of(fd);
  std::vector<std::string> first, second;
  std::jthread early([&] { first = join_all({info_of(1, 2, port)}); });
  ::close(accept(fd, nullptr, nullptr));  // Rank 1 has tried and failed.
  ::close(fd);
  second = join_all({info_of(0, 2, port)});
  early.join();
  expect_each_says(first, "joined");
  expect_each_says(second, "joined");
}

TEST(RendezvousTest, WhatIsNoStoreIsNamed) {
  const int fd = listen_on(0);
  const int port = port_of(fd);
  const std::string where = "127.0.0.1:" + std::to_string(port);
  const auto silent = join_all({info_of(1, 2, port)}, seconds(2));
  expect_each_says(silent, "lost a peer in rendezvous at " + where);
  expect_each_says(silent, "nobody answers there: the port is open, but silent");
  ::close(accept(fd, nullptr, nullptr));
  std::jthread server([fd] {
    const int connection = accept(fd, nullptr, nullptr);
    char greeting[16];
    EXPECT_GT(read(connection, greeting, sizeof greeting), 0);
    EXPECT_EQ(write(connection, "HTTP/1.0 400 Bad Request", 24), 24);
    ::close(connection);
  });
  expect_each_says(join_all({info_of(1, 2, port)}), "what answers at " + where + " is no store");
  ::close(fd);
}

// An earlier job of which rank 1 never came: its process is gone, its file is not.
TEST(RendezvousTest, AStaleFileIsNamedOnEveryRank) {
  if (const char* stale = std::getenv("COHORT_TEST_STALE_FILE")) {
    // A rank that is killed once it has registered: one that gives up would take the file away.
    std::thread([stale] { join_all({at_file(0, 2, stale)}, seconds(20)); }).detach();
    const std::string signature = std::to_string(getpid());
    for (std::string text; text.find(signature) == std::string::npos;) {
      std::ifstream file(stale);
      text.assign(std::istreambuf_iterator<char>(file), {});
      std::this_thread::sleep_for(milliseconds(10));
    }
    kill(getpid(), SIGKILL);
  }
  const TemporaryFolder folder;
  const std::string path = folder.path() / "rendezvous";
  setenv("COHORT_TEST_STALE_FILE", path.c_str(), 1);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::system((self + " --gtest_filter=RendezvousTest.AStaleFileIsNamedOnEveryRank >/dev/null 2>&1")
                  .c_str());
  unsetenv("COHORT_TEST_STALE_FILE");
  if (!std::filesystem::exists(path)) GTEST_FAIL() << "the earlier job left no file";
  const auto start = std::chrono::steady_clock::now();
  const auto results = join_all({at_file(0, 2, path), at_file(1, 2, path)});
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20)) << "30 s when they wait";
  expect_each_says(results, path + " was left by an earlier job (pid ");
  expect_each_says(results, "remove it, then start again");
}

TEST(RendezvousTest, AProcessThatGaveUpLeavesNoFileWhenItEnds) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "rendezvous";
  const auto give_up = [&path] {
    expect_each_says(join_all({at_file(0, 2, path)}, seconds(2)), "1 of 2 ranks have come");
    std::exit(!testing::Test::HasFailure() && std::filesystem::exists(path) ? 0 : 1);
  };
  EXPECT_EXIT(give_up(), testing::ExitedWithCode(0), "");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(RendezvousTest, AFileOfAnotherKindIsRefused) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "notes.txt";
  std::ofstream(path) << "these are my notes, not a store";
  expect_each_says(join_all({at_file(0, 2, path)}), "the file holds something else");
  expect_each_says(join_all({at_file(0, 2, folder.path() / "none" / "rendezvous")}),
                   "cannot be opened: No such file or directory");
}

TEST(RendezvousTest, AnUnknownInterfaceListsThoseThatExist) {
  try {
    ProcessGroup group(info_of(0, 2, free_port()), {.interface = "nonesuch0"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(
        one_line(error).find(
            "--interface nonesuch0: there is no such interface; interfaces with an address are "),
        0u)
        << one_line(error);
    EXPECT_NE(one_line(error).find("lo (127.0.0.1)"), std::string::npos) << one_line(error);
  }
}

TEST(InterfaceTest, TheEnvironmentsRulesAreGloosAndNccls) {
  setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  EXPECT_EQ(interface_of_environment().address, "127.0.0.1");
  unsetenv("GLOO_SOCKET_IFNAME");
  EXPECT_EQ(interface_of_environment().name, "");
  for (const char* rule : {"lo", "l", "=lo", "nonesuch,lo"}) {
    setenv("NCCL_SOCKET_IFNAME", rule, 1);
    EXPECT_EQ(interface_of_environment().name, "lo") << rule;
  }
  for (const char* rule : {"=l", "^l,e,d,v,w,b,t,s,c,o,n", "^"}) {
    setenv("NCCL_SOCKET_IFNAME", rule, 1);
    EXPECT_THROW(interface_of_environment(), ConfigError) << rule;
  }
  unsetenv("NCCL_SOCKET_IFNAME");
}

}  // namespace rendezvous_test
}  // namespace cohort::comm
