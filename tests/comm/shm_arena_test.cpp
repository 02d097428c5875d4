// SPDX-License-Identifier: Apache-2.0
// Tensors in memory that the ranks of a host see: what reads them in place gives the bits that the
// slots give, and nobody touches them after a call.
#include <ATen/ATen.h>
#include <atomic>
#include <csignal>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include "cohort/base/program.h"
#include "cohort/comm/backends/shm/arena.h"
#include "cohort/comm/backends/shm/rank_signals.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/shared_tensor.h"

#include "tests/support/message_of.h"
#include "tests/support/named_in_time.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_mapping.h"

namespace cohort::comm {
namespace shm_arena_test {

using std::chrono::seconds;
using Tensors = std::vector<at::Tensor>;

const ProcessGroupOptions kShm{.backend = "shm"};

at::Tensor shared_copy(const ProcessGroup& group, const at::Tensor& from, int64_t skip = 0) {
  const at::Tensor room = empty_shared(group, from.numel() + skip, from.options());
  return room.narrow(0, skip, from.numel()).copy_(from);
}

// Whose sum depends on the order of its terms.
at::Tensor own_terms(int rank, int64_t numel, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(rank) + 3);
  if (type == at::kBool) return at::randint(0, 2, {numel}).to(type);
  if (!at::isFloatingType(type)) return at::randint(0, 100, {numel}).to(type);
  return (at::randn({numel}) * at::pow(10.0, at::randint(-4, 5, {numel}))).to(type);
}

// Around what goes by the slots, and around the borders of parts; in elements of one byte or more.
const std::vector<int64_t> kLengths{0, 1, 32767, 32768, 131071, 131072, 131073, 200003};

std::vector<ReduceOp> ops_of(at::ScalarType type) {
  using enum ReduceOp;
  if (type == at::kBool) return {kMax, kMin, kBand, kBor};
  if (at::isFloatingType(type)) return {kSum, kMax, kMin, kProduct, kAvg};
  return {kSum, kMax, kMin, kProduct, kBand, kBor, kBxor};
}

void check_all_reduce(const ProcessGroup& group, at::ScalarType type, int64_t numel) {
  for (const ReduceOp op : ops_of(type)) {
    const at::Tensor terms = own_terms(group.rank(), numel, type);
    const at::Tensor expected = terms.clone();
    group.all_reduce(expected, op);
    // Its neighbours in memory stay what they are.
    const at::Tensor room = shared_copy(group, at::cat({terms, terms, terms}));
    group.all_reduce(room.narrow(0, numel, numel), op);
    EXPECT_TRUE(at::equal(room, at::cat({terms, expected, terms})))
        << type << " of " << numel << ", reduction " << static_cast<int>(op);
  }
}

void check_parts(const ProcessGroup& group, at::ScalarType type, int64_t numel) {
  const int size = group.size(), rank = group.rank();
  const at::Tensor terms = own_terms(rank, numel * size, type);
  const at::Tensor mine = terms.narrow(0, 0, numel);
  for (const ReduceOp op : ops_of(type)) {
    const at::Tensor expected = at::empty({numel}, type), out = at::empty({numel}, type);
    group.reduce_scatter(expected, terms.clone(), op);
    const at::Tensor whole = shared_copy(group, terms, 5);
    group.reduce_scatter(out, whole, op);
    EXPECT_TRUE(at::equal(out, expected)) << type << " of " << numel;
    EXPECT_TRUE(at::equal(whole, terms));
    // In place of this rank's part.
    group.reduce_scatter(whole.narrow(0, rank * numel, numel), whole, op);
    EXPECT_TRUE(at::equal(whole.narrow(0, rank * numel, numel), expected)) << type;
  }
  const at::Tensor all = at::empty({numel * size}, type),
                   gathered = at::empty({numel * size}, type);
  group.all_gather_into(all, mine.clone());
  group.all_gather_into(gathered, shared_copy(group, mine, 1));
  EXPECT_TRUE(at::equal(gathered, all)) << type << " of " << numel;
  const at::Tensor whole = shared_copy(group, at::zeros({numel * size}, type));
  whole.narrow(0, rank * numel, numel).copy_(mine);
  group.all_gather_into(whole, whole.narrow(0, rank * numel, numel));
  EXPECT_TRUE(at::equal(whole, all)) << type << " of " << numel << ", in place";

  const at::Tensor exchanged = at::empty({numel * size}, type), out = at::empty_like(exchanged);
  group.all_to_all(exchanged, terms.clone());
  group.all_to_all(out, shared_copy(group, terms, 3));
  EXPECT_TRUE(at::equal(out, exchanged)) << type << " of " << numel;
}

// What this rank writes to is read by others. ProcessGroup would copy it before.
void check_overlaps(const ProcessGroup& group) {
  constexpr int64_t kNumel = 400003;
  const int size = group.size();
  const at::Tensor terms = own_terms(group.rank(), kNumel * size, at::kFloat);
  for (int round = 0; round < 5; ++round) {
    for (int part = 0; part < size; ++part) {
      const at::Tensor whole = shared_copy(group, terms), expected = at::empty({kNumel});
      group.reduce_scatter(expected, terms.clone());
      at::Tensor output = whole.narrow(0, part * kNumel, kNumel), input = whole;
      group.run_collective("reduce_scatter", [&] {
        group.c10d_group().COHORT_REDUCE_SCATTER_SINGLE(output, input, {})->wait();
      });
      EXPECT_TRUE(at::equal(output, expected)) << part;
    }
    at::Tensor x = shared_copy(group, terms), equal_parts = x;
    const at::Tensor expected = at::empty_like(terms);
    group.all_to_all(expected, terms.clone());
    std::vector<int64_t> none, none_either;
    group.run_collective("all_to_all", [&] {
      group.c10d_group().COHORT_ALL_TO_ALL_SINGLE(x, equal_parts, none, none_either, {})->wait();
    });
    EXPECT_TRUE(at::equal(x, expected));
  }
}

TEST(ShmArenaTest, AnOutputMayBeWhatAnotherOfTwoReads) {
  test::ranks(2, check_overlaps, kShm);
}
TEST(ShmArenaTest, AnOutputMayBeWhatAnotherOfThreeReads) {
  test::ranks(3, check_overlaps, kShm);
}

void check_roots(const ProcessGroup& group, at::ScalarType type, int64_t numel) {
  const int last = group.size() - 1;
  const at::Tensor terms = own_terms(group.rank(), numel, type);
  const at::Tensor sent = group.rank() == last ? shared_copy(group, terms) : at::empty_like(terms);
  group.broadcast(sent, last);
  EXPECT_TRUE(at::equal(sent, own_terms(last, numel, type))) << type << " of " << numel;
  const ReduceOp op = ops_of(type).front();
  const at::Tensor expected = terms.clone(), reduced = shared_copy(group, terms);
  group.reduce(expected, last, op);
  group.reduce(reduced, last, op);
  EXPECT_TRUE(at::equal(reduced, expected)) << type << " of " << numel;
  const Tensors all = group.gather(terms.clone(), last);
  const Tensors gathered = group.gather(shared_copy(group, terms), last);
  ASSERT_EQ(gathered.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(gathered[i], all[i]));
}

void check_bits(const ProcessGroup& group) {
  EXPECT_EQ(shares_tensors(group), group.size() > 1);
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt,
                          at::kChar, at::kByte, at::kBool}) {
    const bool all_lengths = type == at::kFloat || type == at::kBFloat16;
    for (const int64_t numel : all_lengths ? kLengths : std::vector<int64_t>{0, 131073}) {
      check_all_reduce(group, type, numel);
      check_parts(group, type, numel);
      check_roots(group, type, numel);
    }
  }
}

TEST(ShmArenaTest, BitsAreThoseOfTheSlotsAlone) {
  test::ranks(1, check_bits, kShm);
}
TEST(ShmArenaTest, BitsAreThoseOfTheSlotsOnTwo) {
  test::ranks(2, check_bits, kShm);
}
TEST(ShmArenaTest, BitsAreThoseOfTheSlotsOnThree) {
  test::ranks(3, check_bits, kShm);
}
TEST(ShmArenaTest, BitsAreThoseOfTheSlotsOnFour) {
  test::ranks(4, check_bits, kShm);
}

// The steps that this rank has taken in the group in whose memory `shared` lies.
uint32_t steps_taken(const ProcessGroup& group, const at::Tensor& shared) {
  return static_cast<const RankLine*>(test::shared_mapping_of(shared))[group.rank()].step.load();
}

// What rank 0 writes after it has begun, and before the other has come, is seen by it: nothing was
// copied. (A program must not do so.)
TEST(ShmArenaTest, NothingIsCopiedBeforeAllHaveCome) {
  test::ranks(
      2,
      [](const ProcessGroup& group) {
        constexpr int64_t kNumel = 100000;
        int number = 0;
        const auto late = [&](const at::Tensor& x, const std::function<Work()>& begin) {
          const std::string key = "written" + std::to_string(number++);
          if (group.rank() == 1) {
            group.store().wait({key});
            return begin().wait();
          }
          const uint32_t before = steps_taken(group, x);
          Work work = begin();
          while (steps_taken(group, x) == before) std::this_thread::yield();
          x.fill_(7);
          group.store().set(key, "");
          work.wait();
        };
        const at::Tensor x = shared_copy(group, at::ones({2 * kNumel}));
        const at::Tensor y = at::empty({4 * kNumel}), part = at::empty({kNumel});
        late(x, [&] { return group.all_reduce_async(x); });
        EXPECT_TRUE(at::equal(x, at::full({2 * kNumel}, 8.0)));
        x.fill_(1);
        group.barrier("all_gather");
        late(x, [&] { return group.all_gather_into_async(y, x); });
        EXPECT_TRUE(at::equal(y.narrow(0, 0, 2 * kNumel), at::full({2 * kNumel}, 7.0)));
        x.fill_(1);
        group.barrier("reduce_scatter");
        late(x, [&] { return group.reduce_scatter_async(part, x); });
        EXPECT_TRUE(at::equal(part, at::full({kNumel}, 8.0)));
        x.fill_(1);
        group.barrier("broadcast");
        late(x, [&] { return group.broadcast_async(x, 0); });
        EXPECT_TRUE(at::equal(x, at::full({2 * kNumel}, 7.0)));
      },
      kShm);
}

// One rank's tensor is its own, another's is of another group's memory.
TEST(ShmArenaTest, TensorsThatLieElsewhereGoByTheSlots) {
  test::ranks(
      3,
      [](const ProcessGroup& world) {
        const ProcessGroup pair = world.subgroup({0, 1, 2}, "again");
        const ProcessGroup two = world.subgroup({0, 2}, "two");
        constexpr int64_t kNumel = 200003;
        const at::Tensor terms = own_terms(world.rank(), kNumel, at::kFloat);
        const at::Tensor expected = terms.clone();
        world.all_reduce(expected);
        for (int odd = 0; odd < 3; ++odd) {
          const at::Tensor x = world.rank() == odd ? terms.clone() : shared_copy(world, terms);
          world.all_reduce(x);
          EXPECT_TRUE(at::equal(x, expected));
          const at::Tensor y = shared_copy(world.rank() == odd ? world : pair, terms);
          pair.all_reduce(y);
          EXPECT_TRUE(at::equal(y, expected));
        }
        if (!two) return;
        const at::Tensor sum = own_terms(0, kNumel, at::kFloat) + own_terms(2, kNumel, at::kFloat);
        for (const ProcessGroup& of : {world, two}) {
          const at::Tensor x = shared_copy(of, terms);
          two.all_reduce(x);
          EXPECT_TRUE(at::equal(x, sum));
        }
      },
      kShm);
}

// Ranks allocate in another order and other sizes: places differ.
TEST(ShmArenaTest, RanksNeedNotAllocateAlike) {
  test::ranks(
      2,
      [](const ProcessGroup& group) {
        const at::Tensor before = group.rank() == 0 ? empty_shared(group, 70001, at::kFloat)
                                                    : empty_shared(group, 10, at::kByte);
        const at::Tensor x = shared_copy(group, at::ones({100000}), group.rank());
        group.all_reduce(x);
        EXPECT_TRUE(at::equal(x, at::full({100000}, 2.0)));
      },
      kShm);
}

TEST(ShmArenaTest, ATensorOutlivesItsGroup) {
  test::ranks(
      2,
      [](const ProcessGroup& world) {
        at::Tensor kept;
        {
          const ProcessGroup group = world.subgroup({0, 1}, "s");
          kept = shared_copy(group, at::ones({100000}));
          group.all_reduce(kept);
        }
        world.barrier("no rank has the group any more");
        EXPECT_TRUE(at::equal(kept, at::full({100000}, 2.0)));
        kept.add_(world.rank());
        world.all_reduce(kept);
        EXPECT_TRUE(at::equal(kept, at::full({100000}, 5.0)));
      },
      kShm);
}

TEST(ShmArenaTest, ANegativeLengthIsRefusedByName) {
  EXPECT_EQ(test::message_of<c10::ValueError>(
                [] { empty_shared(ProcessGroup(RankInfo{}), -1, at::kFloat); }),
            "empty_shared: expected at least 0 elements, got -1");
}

// One rank is limited: all take the slots, and it says so.
void check_limited(int limited, __rlimit_resource resource, rlim_t most) {
  const auto ends = test::run_ranks(
      2,
      [&](const ProcessGroup& world) {
        EXPECT_TRUE(shares_tensors(world));
        const rlimit limit{.rlim_cur = most, .rlim_max = most};
        EXPECT_TRUE(world.rank() != limited || setrlimit(resource, &limit) == 0);
        const ProcessGroup group = world.subgroup({0, 1}, "limited");
        EXPECT_FALSE(shares_tensors(group));
        const at::Tensor x = shared_copy(group, at::ones({100000}));
        group.all_reduce(x);
        EXPECT_TRUE(at::equal(x, at::full({100000}, 2.0)));
      },
      kShm);
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
  const std::string& output = ends[static_cast<size_t>(limited)].output;
  EXPECT_NE(output.find("leaves no room for tensors that ranks share"), std::string::npos)
      << output;
}

TEST(ShmArenaTest, ALimitOfFileSizesLeavesNoRoom) {
  check_limited(0, RLIMIT_FSIZE, 1 << 30);
}
TEST(ShmArenaTest, ALimitOfAddressesOfAnyRankLeavesNoRoom) {
  check_limited(1, RLIMIT_AS, rlim_t{1} << 40);
}

// Addresses that run out are no error.
TEST(ShmArenaTest, ManyGroupsShareAsLongAsThereAreAddresses) {
  test::ranks(
      2,
      [](const ProcessGroup& world) {
        // All that a rank has, but what the groups' own memory takes.
        std::vector<std::pair<void*, size_t>> taken;
        for (size_t bytes = size_t{1} << 46; world.rank() == 1 && bytes >= size_t{1} << 30;) {
          void* at =
              mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
          if (at == MAP_FAILED) {
            bytes /= 2;
          } else {
            taken.emplace_back(at, bytes);
          }
        }
        const ProcessGroup group = world.subgroup({0, 1}, "crowded");
        EXPECT_FALSE(shares_tensors(group));
        const at::Tensor x = shared_copy(group, at::ones({100000}));
        group.all_reduce(x);
        EXPECT_TRUE(at::equal(x, at::full({100000}, 2.0)));
        for (const auto& [at, bytes] : taken) munmap(at, bytes);
        EXPECT_TRUE(shares_tensors(world.subgroup({0, 1}, "roomy")));
      },
      kShm);
}

TEST(ShmArenaFaultTest, ARankThatIsKilledWhileAllSumInPlaceIsNamedSoon) {
  test::expect_named_within(500, [] {
    const auto ends = test::run_ranks(
        3,
        [](const ProcessGroup& group) {
          const at::Tensor x = shared_copy(group, at::ones({1 << 22}));
          std::atomic<int> num_done = 0;
          if (group.rank() == 2)
            std::thread([&] {
              while (num_done < 10) std::this_thread::yield();
              kill(getpid(), SIGKILL);  // most likely in the middle of a sum
            }).detach();
          for (; true; ++num_done) test::time_error_of([&] { group.all_reduce(x); });
        },
        kShm);
    return test::survivors_that_wrote("lost rank 2 in all_reduce(sum)", ends);
  });
}

// Two ranks of one process: who has handed over the memory does not matter here.
class ArenaTest : public testing::Test {
 protected:
  static constexpr size_t kBytes = 4096, kRoom = 1 << 20;
  void SetUp() override {
    std::thread first([&] { memory_ = share(0); });
    other_ = share(1);
    first.join();
  }
  std::shared_ptr<const SharedMemory> share(int rank) const {
    return std::make_shared<const SharedMemory>(
        SharedMemory::share(*store_, rank, 2, kBytes, seconds(20), kRoom));
  }
  std::shared_ptr<Arena> arena() const { return std::make_shared<Arena>(memory_, kBytes, kRoom); }
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::shared_ptr<const SharedMemory> memory_, other_;
};

TEST_F(ArenaTest, WhatIsFreedIsGivenOutAgain) {
  const auto arena = this->arena();
  at::Tensor a = arena->empty(1000, at::kFloat), b = arena->empty(2000, at::kFloat);
  at::Tensor c = arena->empty(3000, at::kFloat);
  const void *at_a = a.data_ptr(), *at_b = b.data_ptr(), *at_c = c.data_ptr();
  EXPECT_EQ(at_a, memory_->data() + kBytes);
  b.reset();
  b = arena->empty(1500, at::kFloat);
  EXPECT_EQ(b.data_ptr(), at_b) << "a shorter one fits";
  a.reset();
  b.reset();
  at::Tensor whole = arena->empty(3000, at::kFloat);
  EXPECT_EQ(whole.data_ptr(), at_a) << "neighbours become one";
  c.reset();
  c = arena->empty(10000, at::kFloat);
  EXPECT_EQ(c.data_ptr(), at_c) << "the last one grows";
  EXPECT_EQ(arena->empty(0, at::kFloat).numel(), 0);
}

TEST_F(ArenaTest, WhatDoesNotFitLiesElsewhere) {
  const auto arena = this->arena();
  const auto is_inside = [&](const at::Tensor& tensor) {
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    return data >= memory_->data() && data < memory_->data() + memory_->size();
  };
  const at::Tensor half = arena->empty(kRoom / 2, at::kByte);
  const at::Tensor more = arena->empty(kRoom / 2 + 1, at::kByte).fill_(3);
  EXPECT_TRUE(is_inside(half));
  EXPECT_FALSE(is_inside(more));
  EXPECT_EQ(more.numel(), kRoom / 2 + 1);
  EXPECT_TRUE(is_inside(arena->empty(kRoom / 2, at::kByte))) << "what is left can be had";
}

// Here more than the file may grow to.
TEST_F(ArenaTest, TheSystemsRefusalIsAnErrorThatNamesTheBytes) {
  const std::string text =
      test::message_of<c10::OutOfMemoryError>([&] { memory_->commit(kBytes, size_t{1} << 50); });
  EXPECT_NE(text.find("shm: expected 1125899906842624 bytes of memory for a tensor that ranks "
                      "share: "),
            std::string::npos)
      << text;
}

TEST_F(ArenaTest, TheMemoryGoesBackWithTheLastTensor) {
  auto arena = this->arena();
  at::Tensor x = arena->empty(1000, at::kByte).fill_(9);
  arena.reset();
  EXPECT_EQ(other_->data()[kBytes + 500], std::byte{9}) << "it lives as long as its tensor";
  x.reset();
  EXPECT_EQ(other_->data()[kBytes + 500], std::byte{0});
}

TEST_F(ArenaTest, AfterAFailureNothingIsGivenOutAgain) {
  const auto arena = this->arena();
  at::Tensor a = arena->empty(1000, at::kByte);
  const void* at_a = a.data_ptr();
  arena->retire();
  a.reset();
  EXPECT_NE(arena->empty(1000, at::kByte).data_ptr(), at_a);
}

TEST_F(ArenaTest, AChildThatForksNeitherHasNorFreesIt) {
  auto arena = this->arena();
  const at::Tensor x = arena->empty(1000, at::kByte).fill_(9);
  auto* data = static_cast<volatile uint8_t*>(x.data_ptr());
  const auto status_of = [](const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGSEGV, SIG_DFL);
      body();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  };
  const int freed = status_of([&] {
    arena->~Arena();
    _exit(3);
  });
  EXPECT_TRUE(WIFEXITED(freed) && WEXITSTATUS(freed) == 3);
  EXPECT_EQ(data[500], 9);
  // What the child maps where the memory was is its own.
  const int unmapped = status_of([&] {
    void* own = mmap(memory_->data(), kBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memory_->release(kBytes, kRoom);
    memory_->~SharedMemory();
    *static_cast<volatile uint8_t*>(own) = 1;
  });
  EXPECT_TRUE(WIFEXITED(unmapped) && WEXITSTATUS(unmapped) == 0) << unmapped;
  EXPECT_EQ(data[500], 9);
  const int read = status_of([&] { _exit(data[500]); });
  EXPECT_TRUE(WIFSIGNALED(read)) << "a read ends it, not old or new values";
}

}  // namespace shm_arena_test
}  // namespace cohort::comm
