// SPDX-License-Identifier: Apache-2.0
// What the backend shm promises beyond what every backend does; the tests of collectives and of
// failures run over it, too.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <filesystem>
#include <gtest/gtest.h>
#include <iterator>
#include <regex>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/fd.h"
#include "cohort/base/process_stat.h"
#include "cohort/base/program.h"
#include "cohort/comm/backends/shm/shared_memory.h"
#include "cohort/comm/process_group.h"

#include "tests/support/coalesced.h"
#include "tests/support/eventually.h"
#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/named_in_time.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace shm_test {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

const ProcessGroupOptions kShm{.backend = "shm"};

void shm_ranks(int world_size, const std::function<void(const ProcessGroup&)>& body) {
  test::ranks(world_size, body, kShm);
}

// Terms whose sum depends on their order.
at::Tensor terms_of(int rank, int64_t numel, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(rank) + 7);
  return (at::randn({numel}) * at::pow(10.0, at::randint(-4, 5, {numel}))).to(type);
}

// In the order of ranks; half types in float32, rounded once.
at::Tensor sum_in_order(int world_size, int64_t numel, at::ScalarType type) {
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  const at::ScalarType wide = half ? at::kFloat : type;
  at::Tensor sum = terms_of(0, numel, type).to(wide);
  for (int rank = 1; rank < world_size; ++rank) sum += terms_of(rank, numel, type).to(wide);
  return sum.to(type);
}

// Around the borders of pieces of 64 KiB, of their parts and of what few bytes take.
const std::vector<int64_t> kLengths{0, 1, 3, 63, 4095, 4097, 16384, 16385, 40000, 131072, 200001};

void check_sums(const ProcessGroup& group) {
  const int size = group.size();
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t numel : kLengths) {
      const at::Tensor expected = sum_in_order(size, numel, type);
      at::Tensor x = terms_of(group.rank(), numel, type);
      group.all_reduce(x);
      EXPECT_TRUE(at::equal(x, expected)) << type << " of " << numel;
      at::Tensor y = terms_of(group.rank(), numel, type);
      group.all_reduce_async(y).wait();
      EXPECT_TRUE(at::equal(y, expected)) << type << " of " << numel << ", in the background";
      at::Tensor z = terms_of(group.rank(), numel, type);
      group.reduce(z, size - 1);
      EXPECT_EQ(at::equal(z, expected), group.rank() == size - 1 || numel == 0)
          << type << " of " << numel;
    }
    const int64_t part = 30011;
    const at::Tensor whole = sum_in_order(size, part * size, type);
    at::Tensor own = at::empty({part}, type);
    group.reduce_scatter(own, terms_of(group.rank(), part * size, type));
    EXPECT_TRUE(at::equal(own, whole.narrow(0, part * group.rank(), part))) << type;
  }
}

TEST(ShmTest, SumsAreInTheOrderOfRanksOnTwo) {
  shm_ranks(2, check_sums);
}
TEST(ShmTest, SumsAreInTheOrderOfRanksOnThree) {
  shm_ranks(3, check_sums);
}
TEST(ShmTest, SumsAreInTheOrderOfRanksOnFour) {
  shm_ranks(4, check_sums);
}
TEST(ShmTest, SumsAreInTheOrderOfRanksAlone) {
  shm_ranks(1, check_sums);
}

c10d::AllreduceOptions with_op(const c10d::ReduceOp& op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

// What c10d can ask for and ProcessGroup does not.
TEST(ShmTest, EveryReductionOfC10d) {
  shm_ranks(3, [](const ProcessGroup& group) {
    const auto reduced = [&](at::Tensor x, const c10d::ReduceOp& op) {
      Tensors tensors{std::move(x)};
      group.c10d_group().allreduce(tensors, with_op(op))->wait();
      return tensors[0];
    };
    const at::Tensor r = at::full({5}, group.rank() + 1.0);
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::ReduceOp::AVG), at::full({5}, 6.0F / 3)));
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::makeNCCLPreMulSum(0.5)), at::full({5}, 3.0)));
    const at::Tensor complex = at::complex(r, -r);
    EXPECT_TRUE(at::equal(reduced(complex.clone(), c10d::ReduceOp::SUM),
                          at::complex(at::full({5}, 6.0), at::full({5}, -6.0))));
    EXPECT_TRUE(at::equal(reduced(r.to(at::kShort), c10d::ReduceOp::PRODUCT),
                          at::full({5}, 6, at::kShort)));
    at::Tensor nan = at::full({2}, group.rank() == 1 ? NAN : 1.0);
    for (const auto op : {c10d::ReduceOp::MAX, c10d::ReduceOp::MIN})
      EXPECT_TRUE(reduced(nan.clone(), op).isnan().all().item<bool>());
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                reduced(complex.clone(), c10d::ReduceOp::MAX);
              }).find("complex numbers have no minimum or maximum"),
              std::string::npos);
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                reduced(r.clone(), c10d::ReduceOp::BXOR);
              }).find("expected integers or bool for a bitwise reduction"),
              std::string::npos);
    for (const auto type : {at::kFloat8_e5m2, at::kUInt32}) {
      EXPECT_NE(test::message_of<c10::ValueError>([&] {
                  reduced(at::empty({2}, type), c10d::ReduceOp::SUM);
                }).find("cannot be reduced"),
                std::string::npos);
    }
    Tensors several{r.clone(), r.to(at::kLong), at::empty({0})};
    group.c10d_group().allreduce_coalesced(several)->wait();
    EXPECT_TRUE(at::equal(several[0], at::full({5}, 6.0)));
    EXPECT_TRUE(at::equal(several[1], at::full({5}, 6, at::kLong)));
  });
}

TEST(ShmTest, CoalescedFormsAreTheirOperations) {
  shm_ranks(3, [](const ProcessGroup& group) { test::expect_coalesced_forms(group); });
}

// Each rank has other rows, one none.
TEST(ShmTest, SparseTensorsAreAdded) {
  shm_ranks(3, [](const ProcessGroup& group) {
    const auto sparse_of = [](int rank) {
      const int64_t num = rank * 40000;
      const at::Tensor rows = at::arange(num).remainder(50000 + rank).unsqueeze(0);
      return at::sparse_coo_tensor(rows, terms_of(rank, num * 2, at::kFloat).view({num, 2}),
                                   {60000, 2}, at::kFloat);
    };
    at::Tensor expected = at::zeros({60000, 2});
    for (int rank = 0; rank < 3; ++rank) expected += sparse_of(rank).coalesce().to_dense();
    Tensors tensors{sparse_of(group.rank())};
    group.c10d_group().allreduce(tensors)->wait();
    EXPECT_TRUE(tensors[0].is_sparse());
    EXPECT_TRUE(at::equal(tensors[0].to_dense(), expected));
    Tensors none{at::sparse_coo_tensor({4, 2}, at::TensorOptions(at::kFloat).layout(at::kSparse))};
    group.c10d_group().allreduce(none)->wait();
    EXPECT_EQ(none[0]._nnz(), 0);
  });
}

// Two groups' operations have nothing to do with each other, whatever their order.
TEST(ShmTest, GroupsDoNotWaitForEachOther) {
  shm_ranks(2, [](const ProcessGroup& world) {
    const ProcessGroup a = world.subgroup({0, 1}, "a");
    const ProcessGroup b = world.subgroup({0, 1}, "b");
    EXPECT_EQ(a.backend(), "shm");
    for (int round = 0; round < 20; ++round) {
      const at::Tensor x = at::ones({100000}), y = at::ones({100000});
      const auto& first = world.rank() == 0 ? a : b;
      const auto& second = world.rank() == 0 ? b : a;
      Work one = first.all_reduce_async(x);
      Work two = second.all_reduce_async(y);
      two.wait();
      one.wait();
      EXPECT_TRUE(at::equal(x, at::full({100000}, 2.0)) && at::equal(y, x));
    }
  });
}

// A program that this one starts would keep it.
bool hands_memory_file_on() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    const int file = std::stoi(entry.path().filename().string());
    if (target.find("cohort-shm") != std::string::npos && (fcntl(file, F_GETFD) & FD_CLOEXEC) == 0)
      return true;
  }
  return false;
}

TEST(ShmTest, NobodyElseGetsItsMemory) {
  shm_ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(group.all_reduce_sum(1), 2);
    EXPECT_FALSE(hands_memory_file_on());
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      EXPECT_EQ(entry.path().filename().string().find("cohort"), std::string::npos) << entry;
  });
}

TEST(ShmTest, MessagesOfAnyLengthAndTagInAnyOrder) {
  shm_ranks(3, [](const ProcessGroup& group) {
    const int to = (group.rank() + 1) % 3, from = (group.rank() + 2) % 3;
    const std::vector<int64_t> lengths{0, 1, 65535, 65536, 1 << 20, 7};
    std::vector<Work> works;
    for (size_t tag = 0; tag < lengths.size(); ++tag)
      works.push_back(group.send_async(at::full({lengths[tag]}, group.rank() * 10.0), to,
                                       static_cast<int>(tag)));
    std::vector<at::Tensor> arrived(lengths.size());
    for (size_t tag = lengths.size(); tag-- > 0;) {
      arrived[tag] = at::empty({lengths[tag]});
      group.recv(arrived[tag], from, static_cast<int>(tag));
    }
    for (Work& work : works) work.wait();
    for (size_t tag = 0; tag < lengths.size(); ++tag)
      EXPECT_TRUE(at::equal(arrived[tag], at::full({lengths[tag]}, from * 10.0))) << tag;
  });
}

// A message of another form is taken, and the receive that it was not for leaves nothing behind.
TEST(ShmTest, AfterARefusedMessageTheNextOfItsTagArrives) {
  shm_ranks(2, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      group.send(at::full({3}, 3.0), 0);
      group.send(at::full({5}, 5.0), 0);
      group.send(at::full({5}, 6.0), 0);
    } else {
      const at::Tensor x = at::zeros({5});
      EXPECT_NE(test::message_of<c10::ValueError>([&] {
                  group.recv(x, 1);
                }).find("expected 5 elements of float32, rank 1 sends 3 of float32"),
                std::string::npos);
      for (const double value : {5.0, 6.0}) {
        group.recv(x, 1);
        EXPECT_TRUE(at::equal(x, at::full({5}, value)));
      }
    }
    group.barrier("end");
  });
}

TEST(ShmTest, ADroppedReceiveLeavesItsMessageToTheNext) {
  shm_ranks(2, [](const ProcessGroup& group) {
    const at::Tensor x = at::zeros({5});
    if (group.rank() == 0) {
      const Work dropped = group.recv_async(x, 1);
    }
    group.barrier("dropped");
    for (const double value : {5.0, 6.0}) {
      if (group.rank() == 1) {
        group.send(at::full({5}, value), 0);
      } else {
        group.recv(x, 1);
        EXPECT_TRUE(at::equal(x, at::full({5}, value)));
      }
    }
    group.barrier("end");
  });
}

// A rank may be done with a group while another has not seen yet that all have come.
TEST(ShmTest, AGroupMayBeDroppedAfterItsLastCollective) {
  shm_ranks(3, [](const ProcessGroup& world) {
    for (int round = 0; round < 40; ++round) {
      const ProcessGroup group = world.subgroup({0, 1, 2}, "s");
      EXPECT_EQ(group.all_reduce_sum(1), 3);
    }
  });
}

TEST(ShmTest, AMessageFromAnyRankNamesItsSender) {
  shm_ranks(3, [](const ProcessGroup& group) {
    auto& c10d_group = group.c10d_group();
    if (group.rank() != 0) {
      Tensors own{at::full({3}, group.rank(), at::kLong)};
      c10d_group.send(own, 0, 5)->wait();
      return;
    }
    std::vector<int> senders;
    for (int i = 0; i < 2; ++i) {
      Tensors any{at::empty({3}, at::kLong)};
      const auto work = c10d_group.recvAnysource(any, 5);
      work->wait();
      EXPECT_EQ(any[0][2].item<int64_t>(), work->sourceRank());
      senders.push_back(work->sourceRank());
    }
    std::sort(senders.begin(), senders.end());
    EXPECT_EQ(senders, (std::vector<int>{1, 2}));
  });
}

// What a rank has sent before it ends arrives; what it has not sent is an error.
TEST(ShmFaultTest, MessagesOfARankThatEnds) {
  const auto ends = test::run_ranks(
      2,
      [](const ProcessGroup& group) {
        if (group.rank() == 1) {
          group.send(at::full({1000}, 4.0), 0);
          std::this_thread::sleep_for(milliseconds(200));
          kill(getpid(), SIGKILL);
        }
        std::this_thread::sleep_for(milliseconds(800));
        at::Tensor x = at::empty({1000});
        group.recv(x, 1);
        EXPECT_TRUE(at::equal(x, at::full({1000}, 4.0)));
        std::printf("the message is there\n");
        std::fflush(stdout);
        group.recv(x, 1);
      },
      kShm);
  EXPECT_EQ(ends[0].exit_code, kExitLostPeer) << ends[0].output;
  EXPECT_NE(ends[0].output.find("the message is there"), std::string::npos) << ends[0].output;
  EXPECT_NE(ends[0].output.find("lost rank 1 in recv from 1"), std::string::npos) << ends[0].output;
}

// In the middle of moving data, again and again at another place.
TEST(ShmFaultTest, ARankThatIsKilledWhileDataMoveIsNamedSoon) {
  test::expect_named_within(500, [] {
    const auto ends = test::run_ranks(
        3,
        [](const ProcessGroup& group) {
          const at::Tensor x = at::ones({1 << 22});
          group.all_reduce(x);
          if (group.rank() == 2)
            std::thread([] {
              std::this_thread::sleep_for(milliseconds(50 + getpid() % 40));
              kill(getpid(), SIGKILL);
            }).detach();
          while (true) test::time_error_of([&] { group.all_reduce(x); });
        },
        kShm);
    return test::survivors_that_wrote("lost rank 2 in all_reduce(sum)", ends);
  });
}

TEST(ShmFaultTest, ARankThatDoesNotComeIsATimeout) {
  const auto ends = test::run_ranks(2,
                                    [](const ProcessGroup& group) {
                                      EXPECT_EQ(group.all_reduce_sum(1), 2);
                                      if (group.rank() == 1)
                                        std::this_thread::sleep_for(std::chrono::seconds(8));
                                      group.all_reduce_sum(1);
                                    },
                                    {.backend = "shm", .timeout = milliseconds(2000)});
  EXPECT_EQ(ends[0].exit_code, kExitLostPeer) << ends[0].output;
  EXPECT_NE(ends[0].output.find("rank 1 has not come"), std::string::npos) << ends[0].output;
  EXPECT_TRUE(std::regex_search(
      ends[0].output, std::regex("shm: rank 1 has not come within [2-9][0-9][0-9][0-9] ms")))
      << ends[0].output;
  EXPECT_EQ(ends[1].exit_code, kExitLostPeer) << "it finds the group dead: " << ends[1].output;
}

// Stands still, and is killed when the others have long left.
void stop_for_seconds(int seconds) {
  const std::string killer = "(sleep " + std::to_string(seconds) + "; kill -KILL " +
                             std::to_string(getpid()) + ") >/dev/null 2>&1 &";
  ASSERT_EQ(std::system(killer.c_str()), 0);
  kill(getpid(), SIGSTOP);
}

// Half of a message is in the memory, and the process of its sender lives.
TEST(ShmFaultTest, AMessageWhoseSenderStopsIsATimeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = test::run_ranks(
      2,
      [](const ProcessGroup& group) {
        const at::Tensor x = at::ones({1 << 20});
        Work message = group.rank() == 1 ? group.send_async(x, 0) : group.recv_async(x, 1);
        std::this_thread::sleep_for(milliseconds(300));
        message.wait();
        const auto pids =
            group.all_gather_object(std::to_string(getpid()));  // One message has arrived.
        if (group.rank() == 1) {
          Work half = group.send_async(x, 0);
          std::this_thread::sleep_for(milliseconds(300));
          stop_for_seconds(7);
        }
        EXPECT_TRUE(test::eventually([&] { return process_stat(std::stoi(pids[1]), 3) == "T"; }));
        group.recv(x, 1);
      },
      {.backend = "shm", .timeout = milliseconds(1500)});
  EXPECT_EQ(ends[0].exit_code, kExitLostPeer) << ends[0].output;
  EXPECT_NE(ends[0].output.find("has not come to an end within 1500 ms"), std::string::npos)
      << ends[0].output;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
}

// Its silence takes all the time that a rank has to answer; those after it have answered.
TEST(ShmFaultTest, OneStoppedRankOfFourIsTheOnlyOneLost) {
  const auto ends = test::run_ranks(4,
                                    [](const ProcessGroup& group) {
                                      EXPECT_EQ(group.all_reduce_sum(1), 4);
                                      if (group.rank() == 1) stop_for_seconds(9);
                                      group.all_reduce_sum(1);
                                    },
                                    {.backend = "shm", .timeout = milliseconds(1500)});
  for (const size_t rank : {0U, 2U, 3U}) {
    EXPECT_EQ(ends[rank].exit_code, kExitLostPeer) << ends[rank].output;
    EXPECT_NE(ends[rank].output.find("lost rank 1 in all_reduce(sum)"), std::string::npos)
        << ends[rank].output;
  }
}

// Without comparing names: what ranks are about to do lies beside their data.
TEST(ShmFaultTest, CallsThatDifferEndAtOnceWithoutComparing) {
  test::expect_named_within(500, [] {
    auto ends = test::run_ranks(2,
                                [](const ProcessGroup& group) {
                                  try {
                                    test::time_error_of([&] {
                                      if (group.rank() == 0) {
                                        group.all_reduce(at::ones({100000}));
                                      } else {
                                        group.broadcast(at::ones({3}), 1);
                                      }
                                    });
                                  } catch (const PeerError& error) {
                                    EXPECT_TRUE(error.facts().disagreement);
                                    throw;
                                  }
                                },
                                {.backend = "shm", .check_collectives = CheckCollectives::kOff});
    for (const auto& end : ends) {
      EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
      EXPECT_NE(end.output.find("the ranks disagree in"), std::string::npos) << end.output;
      EXPECT_EQ(end.output.find("Failure"), std::string::npos) << end.output;
    }
    return ends;
  });
}

// As many elements, in other tensors.
TEST(ShmFaultTest, ListsOfOtherTensorsAreSeen) {
  const auto ends = test::run_ranks(
      2,
      [](const ProcessGroup& group) {
        const int64_t first = group.rank() == 0 ? 5 : 3;
        Tensors list{at::ones({first}), at::ones({8 - first})};
        group.run_collective("both", [&] { group.c10d_group().allreduce_coalesced(list)->wait(); });
      },
      kShm);
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
    EXPECT_NE(end.output.find("the ranks' calls differ"), std::string::npos) << end.output;
  }
}

TEST(ShmTest, AutoTakesItForRanksOfOneHostAlone) {
  const auto ends =
      test::run_ranks(4,
                      [](const ProcessGroup& group) {
                        EXPECT_EQ(group.backend(), "shm");
                        test::on_hosts(group, {"a", "a", "b", "b"}, [](const ProcessGroup& ranks) {
                          EXPECT_EQ(ranks.backend(), "hierarchical");
                          EXPECT_EQ(ranks.all_reduce_sum(1), 4);
                          const ProcessGroup first = ranks.subgroup({0, 1}, "a");
                          const ProcessGroup second = ranks.subgroup({2, 3}, "b");
                          const ProcessGroup& pair = first ? first : second;
                          EXPECT_EQ(pair.backend(), "shm");
                          EXPECT_EQ(pair.all_reduce_sum(1), 2);
                          const ProcessGroup across = ranks.subgroup({1, 2}, "across");
                          EXPECT_TRUE(!across || across.backend() == "gloo");
                          ranks.barrier("all are connected");
                        });
                      },
                      {.backend = "auto"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

// One rank may write no file that is large enough: all take Gloo, and it says why.
TEST(ShmTest, AutoSaysWhyARankSharesNoMemory) {
  const auto ends = test::run_ranks(
      3,
      [](const ProcessGroup& group) {
        const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
        EXPECT_TRUE(group.rank() != 1 || setrlimit(RLIMIT_FSIZE, &limit) == 0);
        test::on_hosts(group, {"a", "a", "a"},
                       [](const ProcessGroup& ranks) {
                         EXPECT_EQ(ranks.backend(), "gloo");
                         EXPECT_EQ(ranks.all_reduce_sum(1), 3);
                         const ProcessGroup others = ranks.subgroup({0, 2}, "others");
                         EXPECT_TRUE(!others || others.backend() == "shm");
                       },
                       {.backend = "auto"});
      },
      {.backend = "gloo"});
  for (size_t rank = 0; rank < 3; ++rank) {
    const std::string& output = ends[rank].output;
    EXPECT_EQ(ends[rank].exit_code, 0) << output;
    EXPECT_EQ(output.find("backend auto takes gloo: this rank shares no memory with the others of "
                          "its host: expected a limit of file sizes (ulimit -f) of at least") !=
                  std::string::npos,
              rank == 1)
        << output;
    EXPECT_EQ(output.find("KiB, got 1024 KiB") != std::string::npos, rank == 1) << output;
  }
}

// Rank 0 makes the memory. A group of two needs less than `auto` asks for.
TEST(ShmTest, ALimitOfFileSizesThatIsTooLowIsNamedAndAHigherOneIsNone) {
  const auto ends =
      test::run_ranks(2,
                      [](const ProcessGroup& group) {
                        const auto limit_to = [](rlim_t bytes) {
                          const rlimit limit{.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
                          ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
                        };
                        limit_to(rlim_t{10} << 20);
                        const auto shared = group.subgroup({0, 1}, "shared", {.backend = "shm"});
                        EXPECT_EQ(shared.all_reduce_sum(1), 2);
                        limit_to(rlim_t{64} << 10);
                        group.subgroup({0, 1}, "more", {.backend = "shm"});
                      },
                      {.backend = "gloo", .timeout = milliseconds(5000)});
  for (const auto& end : ends) EXPECT_NE(end.exit_code, 0) << end.output;
  EXPECT_NE(ends[0].output.find("shm: expected a limit of file sizes (ulimit -f) of at least "),
            std::string::npos)
      << ends[0].output;
}

TEST(ShmTest, RanksOfSeveralHostsAreRefusedByName) {
  const auto ends =
      test::run_ranks(2,
                      [](const ProcessGroup& group) {
                        setenv("COHORT_HOST_NAME", group.rank() == 0 ? "north" : "south", 1);
                        group.subgroup({0, 1}, "s", {.backend = "shm"});
                      },
                      {.backend = "gloo"});
  EXPECT_EQ(ends[0].exit_code, kExitUsage) << ends[0].output;
  EXPECT_NE(ends[0].output.find("backend shm: expected all ranks on one host, rank 1 is on south"),
            std::string::npos)
      << ends[0].output;
}

size_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// A job has several groups where layers are partitioned and shards stay within hosts.
TEST(ShmTest, AGroupStartsNoThreadBeforeItsFirstOperationInTheBackground) {
  shm_ranks(2, [](const ProcessGroup& group) {
    group.barrier("connected");
    const size_t before = num_threads();
    std::vector<ProcessGroup> groups;
    for (int i = 0; i < 5; ++i)
      groups.push_back(group.subgroup({0, 1}, "part" + std::to_string(i)));
    for (const ProcessGroup& each : groups) {
      EXPECT_EQ(each.all_reduce(at::ones({1000})).sum().item<double>(), 2000);
      each.barrier("reduced");
    }
    EXPECT_EQ(num_threads(), before);
    groups[3].all_reduce_async(at::ones({1000})).wait();
    EXPECT_EQ(num_threads(), before + 1);
  });
}

// What strangers do while rank 0 hands over its memory.
class StrangerTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 1 << 16;

  Fd connection() const { return connection_to(store_->get_to_str("socket")); }

  static Fd connection_to(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    return socket;
  }

  // Rank 0 and rank 1, while `strangers` do what they want.
  void share(const std::function<void()>& strangers) {
    std::thread first([&] {
      const SharedMemory memory =
          SharedMemory::share(*store_, 0, 2, kBytes, std::chrono::seconds(20));
      memory.data()[kBytes - 1] = std::byte{42};
      store_->set("written", "");
      store_->wait({"read"});
    });
    strangers();
    {
      const SharedMemory memory =
          SharedMemory::share(*store_, 1, 2, kBytes, std::chrono::seconds(20));
      store_->wait({"written"});
      EXPECT_EQ(memory.data()[kBytes - 1], std::byte{42});
      EXPECT_EQ(memory.data()[0], std::byte{0});
    }
    store_->set("read", "");
    first.join();
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

bool gets_an_answer(const Fd& socket) {
  char byte = 0;
  return recv(socket.get(), &byte, 1, 0) == 1;
}

TEST_F(StrangerTest, WhoDoesNotKnowTheSecretGetsNothing) {
  share([&] {
    const Fd silent = connection();
    const Fd liar = connection();
    const std::array<char, 36> hello{};
    EXPECT_EQ(send(liar.get(), hello.data(), hello.size(), 0), std::ssize(hello));
    EXPECT_FALSE(gets_an_answer(liar));
    EXPECT_FALSE(gets_an_answer(silent)) << "it is dropped, not waited for";
  });
}

TEST_F(StrangerTest, AnotherUserGetsNothing) {
  std::array<int, 2> pair{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair.data()), 0);
  const Fd near(pair[0]), far(pair[1]);
  EXPECT_TRUE(is_peer_of_user(near, geteuid()));
  EXPECT_FALSE(is_peer_of_user(near, geteuid() + 1));
  // The whole way: only root can be another user.
  if (geteuid() != 0) return;
  share([&] {
    const std::string name = store_->get_to_str("socket");
    const std::string secret = store_->get_to_str("secret");
    // After a fork with threads about, the child takes no lock of the store's.
    const pid_t child = fork();
    if (child == 0) {
      if (setuid(65534) != 0) _exit(2);
      const Fd socket = connection_to(name);
      std::array<char, 36> hello{};
      std::copy(secret.begin(), secret.end(), hello.begin());
      const int32_t rank = 1;
      std::memcpy(hello.data() + 32, &rank, sizeof rank);
      send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL);
      _exit(gets_an_answer(socket) ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  });
}

TEST_F(StrangerTest, ARankThatDoesNotComeIsATimeout) {
  const std::string text = test::message_of<c10::DistError>(
      [&] { SharedMemory::share(*store_, 0, 3, kBytes, milliseconds(100)); });
  EXPECT_EQ(text, "shm: 2 of 2 ranks have not fetched the memory in time");
}

}  // namespace shm_test
}  // namespace cohort::comm
