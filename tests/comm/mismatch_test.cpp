// SPDX-License-Identifier: Apache-2.0
// Ranks that call different collectives: what each gets to read, and how soon.
#include <ATen/ATen.h>
#include <cstdlib>
#include <gtest/gtest.h>
#include <signal.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/process_group.h"

#include "tests/support/named_in_time.h"
#include "tests/support/names_difference.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace mismatch_test {

using std::chrono::seconds;

// What the last rank calls and what the others do, and in which call they are told to disagree.
struct Difference {
  std::string odd;
  std::string usual;
  std::string in{};  // Empty: not looked at.
};

// Every rank must end with a PeerError that names `difference`, long before the group's timeout of
// 60 s. Returns how they ended.
std::vector<test::RankEnd> expect_named(int world_size, const Difference& difference,
                                        const std::function<void(const ProcessGroup&)>& body,
                                        CheckCollectives check = CheckCollectives::kOn) {
  const auto start = std::chrono::steady_clock::now();
  auto ends =
      test::run_ranks(world_size, body, {.timeout = seconds(60), .check_collectives = check});
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30));
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const std::string& output = ends[rank].output;
    EXPECT_EQ(ends[rank].exit_code, 3) << "rank " << rank << " wrote: " << output;
    EXPECT_TRUE(test::names_difference(output, world_size, world_size - 1, difference.odd,
                                       difference.usual) &&
                (difference.in.empty() ||
                 output.find("the ranks disagree in " + difference.in) != std::string::npos))
        << "rank " << rank << " wrote: " << output << "expected " << difference.odd << " beside "
        << difference.usual << " in " << difference.in;
  }
  return ends;
}

// Each case on two ranks, where rank 1 differs, and on three, where rank 2 does.
class MismatchTest : public testing::TestWithParam<int> {
 protected:
  int world_size() const { return GetParam(); }
  static bool is_odd_one(const ProcessGroup& group) { return group.rank() == group.size() - 1; }
};

TEST_P(MismatchTest, Shapes) {
  expect_named(world_size(),
               {.odd = "all_reduce(sum) of float32[8] at mismatch_test.cpp:",
                .usual = "all_reduce(sum) of float32[4] at mismatch_test.cpp:",
                .in = "all_reduce(sum) #2"},
               [](const ProcessGroup& group) {
                 group.all_reduce_sum(1);
                 at::Tensor x = at::ones({is_odd_one(group) ? 8 : 4});
                 group.all_reduce(x);
               });
}

TEST_P(MismatchTest, ShapesWithEqualNumbersOfElements) {
  expect_named(
      world_size(),
      {.odd = "broadcast from 0 of float32[4, 2]", .usual = "broadcast from 0 of float32[2, 4]"},
      [](const ProcessGroup& group) {
        at::Tensor x = is_odd_one(group) ? at::ones({4, 2}) : at::ones({2, 4});
        group.broadcast(x);
      });
}

// Gloo itself adds the bits of one type to those of the other, and says nothing.
TEST_P(MismatchTest, Types) {
  expect_named(world_size(),
               {.odd = "all_reduce(sum) of int32[4]", .usual = "all_reduce(sum) of float32[4]"},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4}, is_odd_one(group) ? at::kInt : at::kFloat);
                 group.all_reduce(x);
               });
}

TEST_P(MismatchTest, Reductions) {
  expect_named(world_size(),
               {.odd = "all_reduce(max) of float32[4]", .usual = "all_reduce(sum) of float32[4]"},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4});
                 group.all_reduce(x, is_odd_one(group) ? ReduceOp::kMax : ReduceOp::kSum);
               });
}

TEST_P(MismatchTest, Roots) {
  expect_named(world_size(),
               {.odd = "broadcast from 1 of float32[4]", .usual = "broadcast from 0 of float32[4]"},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4});
                 group.broadcast(x, is_odd_one(group) ? 1 : 0);
               });
}

TEST_P(MismatchTest, Order) {
  expect_named(world_size(),
               {.odd = "barrier \"end\" at", .usual = "all_reduce(sum) of float32[4] at"},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4});
                 if (!is_odd_one(group)) group.all_reduce(x);
                 group.barrier("end");
               });
}

// The second time round, calls are known and not compared: the data never match, and after two
// seconds the watching threads compare.
TEST_P(MismatchTest, OrderOfCallsThatAreKnown) {
  expect_named(world_size(),
               {.odd = "all_reduce(max) of float32[4] at",
                .usual = "all_reduce(sum) of float32[4] at",
                .in = "all_reduce("},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4});
                 group.all_reduce(x);
                 group.all_reduce(x, ReduceOp::kMax);
                 group.all_reduce(x, is_odd_one(group) ? ReduceOp::kMax : ReduceOp::kSum);
                 TORCH_CHECK_VALUE(false, "continued with ", x);
               });
}

TEST_P(MismatchTest, ShapesOfCallsThatAreKnown) {
  expect_named(world_size(),
               {.odd = "all_reduce(sum) of float32[8]",
                .usual = "all_reduce(sum) of float32[4]",
                .in = "all_reduce(sum) #3"},
               [](const ProcessGroup& group) {
                 at::Tensor small = at::ones({4});
                 at::Tensor large = at::ones({8});
                 group.all_reduce(small);
                 group.all_reduce(large);
                 group.all_reduce(is_odd_one(group) ? large : small);
                 TORCH_CHECK_VALUE(false, "continued");
               });
}

TEST_P(MismatchTest, KnownBarriersAndCallsAreToldApart) {
  expect_named(world_size(), {.odd = "barrier \"end\"", .usual = "all_reduce(sum)"},
               [](const ProcessGroup& group) {
                 at::Tensor x = at::ones({4});
                 for (int round = 0; round < 3; ++round) {
                   group.barrier("end");
                   if (round < 2 || !is_odd_one(group)) group.all_reduce(x);
                 }
                 group.barrier("end");
               });
}

// At once, not after the two seconds of the watching threads.
TEST_P(MismatchTest, KnownCallsAreComparedOnRequest) {
  test::expect_named_within(1900, [&] {
    return expect_named(
        world_size(),
        {.odd = "all_reduce(max) of float32[4] at", .usual = "all_reduce(sum) of float32[4] at"},
        [](const ProcessGroup& group) {
          at::Tensor x = at::ones({4});
          group.all_reduce(x);
          group.all_reduce(x, ReduceOp::kMax);
          test::time_error_of([&] {
            group.all_reduce_async(x, is_odd_one(group) ? ReduceOp::kMax : ReduceOp::kSum).wait();
          });
        },
        CheckCollectives::kAlways);
  });
}

// The second time round, the call is known and goes out unasked: the data never match, and after
// two seconds the watching threads tell.
TEST_P(MismatchTest, OrderOfAsynchronousCallsThatAreKnown) {
  expect_named(
      world_size(),
      {.odd = "all_reduce(max) of float32[4]", .usual = "all_reduce(sum) of float32[4]"},
      [](const ProcessGroup& group) {
        at::Tensor x = at::ones({4});
        group.all_reduce_async(x).wait();
        group.all_reduce_async(x, ReduceOp::kMax).wait();
        group.all_reduce_async(x, is_odd_one(group) ? ReduceOp::kMax : ReduceOp::kSum).wait();
        TORCH_CHECK_VALUE(false, "continued with ", x);
      });
}

// Gloo itself ends the process of the rank that gets more than it expects.
TEST_P(MismatchTest, ShapesOfAsynchronousCallsThatAreKnown) {
  expect_named(world_size(),
               {.odd = "all_reduce(sum) of float32[8]",
                .usual = "all_reduce(sum) of float32[4]",
                .in = "all_reduce(sum) #3"},
               [](const ProcessGroup& group) {
                 at::Tensor small = at::ones({4});
                 at::Tensor large = at::ones({8});
                 group.all_reduce_async(small).wait();
                 group.all_reduce_async(large).wait();
                 group.all_reduce_async(is_odd_one(group) ? large : small).wait();
               });
}

// Only the odd one has it compared, and the comparison must not match the others' data.
TEST_P(MismatchTest, AnAsynchronousCallThatIsNewWhereTheOthersKnowTheirs) {
  expect_named(
      world_size(),
      {.odd = "all_reduce(max) of float32[4]", .usual = "all_reduce(sum) of float32[4]"},
      [](const ProcessGroup& group) {
        at::Tensor x = at::ones({4});
        group.all_reduce_async(x).wait();
        group.all_reduce_async(x, is_odd_one(group) ? ReduceOp::kMax : ReduceOp::kSum).wait();
      });
}

TEST_P(MismatchTest, RepeatedAsynchronousCallsBetweenOthersAgree) {
  test::ranks(world_size(), [](const ProcessGroup& group) {
    for (int round = 0; round < 3; ++round) {
      at::Tensor x = at::ones({4});
      at::Tensor y = at::ones({100000});
      Work first = group.all_reduce_async(x);
      Work second = group.all_reduce_async(y, ReduceOp::kMax);
      group.barrier("between");
      first.wait();
      second.wait();
      EXPECT_EQ(x[0].item<float>(), group.size());
      EXPECT_EQ(y.sum().item<float>(), 100000);
    }
  });
}

TEST_P(MismatchTest, AsynchronousShapes) {
  expect_named(world_size(),
               {.odd = "all_gather of float32[8]", .usual = "all_gather of float32[4]"},
               [](const ProcessGroup& group) {
                 const at::Tensor x = at::ones({is_odd_one(group) ? 8 : 4});
                 at::Tensor all = at::empty({x.numel() * group.size()});
                 group.all_gather_into_async(all, x).wait();
               });
}

TEST_P(MismatchTest, NamesOfBarriers) {
  expect_named(world_size(), {.odd = "barrier \"b\"", .usual = "barrier \"a\""},
               [](const ProcessGroup& group) { group.barrier(is_odd_one(group) ? "b" : "a"); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, MismatchTest, testing::Values(2, 3));

// Without comparison both wait in the backend; after two seconds the watching threads compare
// notes.
TEST(MismatchWatchTest, StuckRanksAreFoundWithoutComparison) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends =
      test::run_ranks(3,
                      [](const ProcessGroup& group) {
                        at::Tensor x = at::ones({4});
                        if (group.rank() == 1) {
                          group.broadcast(x, 1);
                          group.barrier("end");
                        } else {
                          group.all_reduce(x);
                        }
                      },
                      {.timeout = seconds(60), .check_collectives = CheckCollectives::kOff});
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(30));
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 3);
    EXPECT_TRUE(test::names_difference(end.output, 3, 1,
                                       "broadcast from 1 of float32[4] at mismatch_test.cpp:",
                                       "all_reduce(sum) of float32[4] at mismatch_test.cpp:"))
        << end.output;
  }
}

TEST(MismatchWatchTest, TermsOfTheRanksMustAgree) {
  const auto ends = test::run_ranks(
      2, [](const ProcessGroup&) {},
      {.rendezvous_timeout = seconds(20),
       .check_collectives = std::string(std::getenv("RANK") ? std::getenv("RANK") : "0") == "0"
                                ? CheckCollectives::kOn
                                : CheckCollectives::kOff});
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 2) << end.output;
    EXPECT_NE(end.output.find("check_collectives off"), std::string::npos) << end.output;
    EXPECT_NE(end.output.find("check_collectives on"), std::string::npos) << end.output;
  }
}

// A rank that computes on is named with what it did last, when the others' patience is over.
TEST(MonitoredBarrierTest, NamesWhoHasNotCome) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
    group.all_reduce_sum(1);
    if (group.rank() == 2) std::this_thread::sleep_for(seconds(9));
    group.barrier("epoch", seconds(4));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(40));
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ends[rank].exit_code, 3);
    EXPECT_NE(ends[rank].output.find("in barrier \"epoch\" #2"), std::string::npos)
        << ends[rank].output;
    EXPECT_NE(ends[rank].output.find("rank 2 has not come: outside of collectives since "),
              std::string::npos)
        << ends[rank].output;
    EXPECT_NE(
        ends[rank].output.find(", last called all_reduce(sum) of int64[1] at mismatch_test.cpp:"),
        std::string::npos)
        << ends[rank].output;
  }
}

// Neither is the one that the other has not come to.
TEST(MonitoredBarrierTest, RanksThatWaitInDifferentGuardedCallsAreBothNamed) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& group) {
    group.all_reduce_sum(1);
    if (group.rank() == 0) return group.barrier("epoch", seconds(3));
    group.translate_errors("all_reduce of gradients",
                           [&] { std::this_thread::sleep_for(seconds(7)); });
  });
  EXPECT_NE(ends[0].output.find("rank 0 waits in barrier \"epoch\" at mismatch_test.cpp:"),
            std::string::npos)
      << ends[0].output;
  EXPECT_NE(ends[0].output.find("; rank 1 waits in all_reduce of gradients at mismatch_test.cpp:"),
            std::string::npos)
      << ends[0].output;
}

// A slow rank is no mismatch.
TEST(MismatchWatchTest, WaitingLongForASlowRankIsNoFault) {
  test::ranks(2, [](const ProcessGroup& group) {
    at::Tensor x = at::ones({4});
    if (group.rank() == 1) std::this_thread::sleep_for(seconds(3));
    group.all_reduce(x);
    if (group.rank() == 0) std::this_thread::sleep_for(seconds(3));
    group.broadcast(x, 0);
    EXPECT_EQ(x[0].item<float>(), 2);
  });
}

// Two groups of one name wait in calls of their own, long enough to publish their flight records.
TEST(MismatchFaultTest, GroupsOfOneNameAreToldApart) {
  test::ranks(4, [](const ProcessGroup& group) {
    const auto first = group.subgroup({0, 1}, "row");
    const auto second = group.subgroup({2, 3}, "row");
    const ProcessGroup& row = first ? first : second;
    at::Tensor x = at::ones({first ? 4 : 8});
    if (row.rank() == 1) std::this_thread::sleep_for(seconds(4));
    row.all_reduce(x);
    EXPECT_EQ(x[0].item<float>(), 2);
    group.barrier("end");
  });
}

TEST(MismatchFaultTest, WhatAnErrorCutsIsComparedInFull) {
  expect_named(3, {.odd = "subgroup", .usual = "subgroup", .in = "subgroup"},
               [](const ProcessGroup& group) {
                 group.subgroup({0, group.rank() == 2 ? 2 : 1}, std::string(80, 'x'));
               });
}

TEST(MismatchFaultTest, ASuspendedStoreHostIsWaitedFor) {
  test::ranks(2, [](const ProcessGroup& group) {
    group.barrier("before one is suspended");
    if (group.rank() == 0) {
      const std::string waker =
          "(sleep 6; kill -CONT " + std::to_string(getpid()) + ") >/dev/null 2>&1 &";
      ASSERT_EQ(std::system(waker.c_str()), 0);
      kill(getpid(), SIGSTOP);
    }
    EXPECT_EQ(group.all_reduce_sum(1), 2);
    EXPECT_EQ(group.all_reduce_sum(group.rank()), 1);
  });
}

TEST(MismatchFaultTest, AStoppedStoreHostIsNamedWithinSeconds) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends =
      test::run_ranks(3,
                      [](const ProcessGroup& group) {
                        const auto pids = group.all_gather_object(std::to_string(getpid()));
                        if (group.rank() == 0) {
                          // Stands still until the others have left; a stopped process gets no
                          // signal but this.
                          const std::string there =
                              "[ -e /proc/" + pids[1] + "/exe -o -e /proc/" + pids[2] + "/exe ]";
                          const std::string killer = "(for i in $(seq 300); do " + there +
                                                     " || break; sleep 0.2; done; kill -KILL " +
                                                     pids[0] + ") >/dev/null 2>&1 &";
                          ASSERT_EQ(std::system(killer.c_str()), 0);
                          kill(getpid(), SIGSTOP);
                        }
                        group.all_reduce_sum(1);
                      },
                      {.timeout = seconds(5)});
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(45)) << "60 s when they hang";
  for (size_t rank = 1; rank < 3; ++rank) {
    EXPECT_EQ(ends[rank].exit_code, 3);
    EXPECT_NE(ends[rank].output.find("lost rank 0 in all_reduce(sum) #"), std::string::npos)
        << ends[rank].output;
  }
}

}  // namespace mismatch_test
}  // namespace cohort::comm
