// SPDX-License-Identifier: Apache-2.0
// Process groups as handles; tensors of any strides; the asynchronous form of every operation.
#include <ATen/ATen.h>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <sched.h>
#include <string>
#include <thread>
#include <torch/autograd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/rendezvous.h"

#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace handles_test {

using std::chrono::milliseconds;
using std::chrono::seconds;

// [rows, columns], all `value`, in the memory layouts that a program may come with.
std::vector<std::pair<std::string, at::Tensor>> layouts(int64_t rows, int64_t columns,
                                                        double value) {
  return {{"contiguous", at::full({rows, columns}, value)},
          {"transposed", at::full({columns, rows}, value).t()},
          {"narrowed", at::full({rows, columns + 3}, value).narrow(1, 2, columns)},
          {"every other row", at::full({2 * rows, columns}, value).slice(0, 0, 2 * rows, 2)}};
}

void expect_all(const at::Tensor& tensor, double value, const std::string& what) {
  EXPECT_TRUE(tensor.eq(value).all().item<bool>()) << what << " gave " << tensor;
}

// Row r is r + 1 everywhere: what ranks that sent their number plus one leave behind.
void expect_rows(const at::Tensor& tensor, const std::string& what) {
  for (int64_t row = 0; row < tensor.size(0); ++row)
    expect_all(tensor[row], static_cast<double>(row) + 1, what);
}

// libtorch only marks these: their memory holds other values.
TEST(StridedTest, LazilyConjugatedAndNegatedTensors) {
  test::ranks(2, [](const ProcessGroup& group) {
    const at::Tensor z = at::complex(at::full({3}, 1.0 + group.rank()), at::full({3}, 2.0));
    const at::Tensor conjugated = z.conj();
    ASSERT_TRUE(conjugated.is_conj());
    group.broadcast(conjugated);
    EXPECT_TRUE(conjugated.equal(at::complex(at::ones({3}), at::full({3}, -2.0))));
    const at::Tensor imaginary = at::complex(at::ones({1}), at::full({1}, 1.0 + group.rank()));
    const at::Tensor negated = at::imag(imaginary.conj());
    ASSERT_TRUE(negated.is_neg() && negated.is_contiguous());
    EXPECT_EQ(group.all_gather(negated)[1].item<double>(), -2);
    group.all_reduce(negated, ReduceOp::kMax);
    EXPECT_EQ(negated.item<double>(), -1);
  });
}

TEST(StridedTest, WhatIsWrittenInPlaceKeepsItsLayout) {
  for (const int num_ranks : {1, 2, 3}) {
    test::ranks(num_ranks, [](const ProcessGroup& group) {
      const int size = group.size();
      const double own = group.rank() + 1;
      const double sum = size * (size + 1) / 2.0;
      for (auto& [name, tensor] : layouts(3, 4, own)) {
        const auto strides = tensor.strides().vec();
        EXPECT_TRUE(group.all_reduce(tensor).is_same(tensor));
        expect_all(tensor, sum, "all_reduce of " + name);
        EXPECT_EQ(tensor.strides().vec(), strides);
      }
      for (auto& [name, tensor] : layouts(3, 4, own)) {
        group.all_reduce(tensor, ReduceOp::kAvg);
        expect_all(tensor, sum / size, "average of " + name);
      }
      for (auto& [name, tensor] : layouts(3, 4, own)) {
        group.reduce(tensor, size - 1);
        if (group.rank() == size - 1) expect_all(tensor, sum, "reduce of " + name);
      }
      for (auto& [name, tensor] : layouts(3, 4, own)) {
        group.broadcast(tensor, size - 1);
        expect_all(tensor, size, "broadcast of " + name);
      }
    });
  }
}

TEST(StridedTest, WhatIsFilledOrReadMayHaveAnyLayout) {
  for (const int num_ranks : {1, 2, 3}) {
    test::ranks(num_ranks, [](const ProcessGroup& group) {
      const int64_t size = group.size();
      const double own = group.rank() + 1;
      const double sum = static_cast<double>(size * (size + 1)) / 2;
      const auto inputs = layouts(1, 4, own);
      const auto wholes = layouts(size, 4, own);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto& [name, input] = inputs[i];
        at::Tensor output = layouts(size, 4, 0)[i].second;
        group.all_gather_into(output, input);
        expect_rows(output, "all_gather_into of " + name);

        at::Tensor part = layouts(1, 4, 0)[i].second;
        group.reduce_scatter(part, wholes[i].second);
        expect_all(part, sum, "reduce_scatter of " + name);
        expect_all(wholes[i].second, own, "reduce_scatter's input, " + name);

        at::Tensor exchanged = layouts(size, 4, 0)[i].second;
        group.all_to_all(exchanged, wholes[i].second);
        expect_rows(exchanged, "all_to_all of " + name);

        at::Tensor taken = layouts(1, 4, 0)[i].second;
        std::vector<at::Tensor> parts;
        for (int64_t rank = 0; group.rank() == 0 && rank < size; ++rank)
          parts.push_back(layouts(1, 4, static_cast<double>(rank) + 1)[i].second);
        group.scatter(taken, parts);
        expect_all(taken, own, "scatter of " + name);
        const auto gathered = group.gather(input);
        for (size_t rank = 0; rank < gathered.size(); ++rank)
          expect_all(gathered[rank], static_cast<double>(rank) + 1, "gather of " + name);
      }
    });
  }
}

TEST(StridedTest, MessagesMayHaveAnyLayout) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const auto& [name, tensor] : layouts(3, 4, group.rank() + 1)) {
      if (group.rank() == 0) {
        group.send(tensor, 1);
      } else {
        expect_all(group.recv(tensor, 0), 1, name);
      }
    }
  });
}

// A tensor is a handle to its memory: what a temporary one shows is written.
TEST(StridedTest, ATemporaryViewIsWritten) {
  test::ranks(2, [](const ProcessGroup& group) {
    at::Tensor x = at::ones({2, 3});
    group.all_reduce(x.narrow(1, 0, 2));
    EXPECT_TRUE(x.equal(at::tensor({2., 2., 1., 2., 2., 1.}, at::kFloat).view({2, 3}))) << x;
    Work work = group.all_reduce_async(x.t().select(0, 2));
    work.wait();
    expect_all(x, 2, "all_reduce_async of a column");
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                group.all_reduce(at::ones({1}).expand({4}));
              }).find("all_reduce: expected"),
              std::string::npos);
  });
}

// As any other in-place operation: a backward that needs the old values is refused.
TEST(VersionTest, WhatIsWrittenGetsANewVersion) {
  test::ranks(2, [](const ProcessGroup& group) {
    const std::vector<std::pair<std::string, std::function<void(const at::Tensor&)>>> calls{
        {"all_reduce", [&](const at::Tensor& x) { group.all_reduce(x); }},
        {"all_reduce_async", [&](const at::Tensor& x) { group.all_reduce_async(x).wait(); }},
        {"reduce", [&](const at::Tensor& x) { group.reduce(x); }},
        {"all_gather_into",
         [&](const at::Tensor& x) { group.all_gather_into(x, at::ones({x.numel() / 2})); }},
        {"reduce_scatter",
         [&](const at::Tensor& x) { group.reduce_scatter(x, at::ones({2 * x.numel()})); }},
        {"all_to_all", [&](const at::Tensor& x) { group.all_to_all(x, at::ones_like(x)); }},
        {"scatter", [&](const at::Tensor& x) {
           const at::Tensor one = at::ones_like(x);
           group.scatter(x, group.rank() == 0 ? std::vector{one, one} : std::vector<at::Tensor>{});
         }}};
    for (const auto& [name, call] : calls) {
      const at::Tensor weight = at::ones({4}).requires_grad_();
      const at::Tensor x = at::ones({4});
      const at::Tensor loss = (weight * x).sum();  // The backward needs x as it is now.
      call(x);
      EXPECT_NE(test::message_of<c10::Error>([&] { loss.backward(); }).find("inplace operation"),
                std::string::npos)
          << name;
    }
    // The root of a broadcast has its values still.
    const at::Tensor weight = at::ones({4}).requires_grad_();
    const at::Tensor x = at::ones({4});
    const at::Tensor loss = (weight * x).sum();
    group.broadcast(x, 0);
    if (group.rank() == 0) {
      loss.backward();
    } else {
      EXPECT_NE(test::message_of<c10::Error>([&] { loss.backward(); }).find("inplace operation"),
                std::string::npos);
    }
  });
}

TEST(AsyncTest, EveryOperationHasAnAsynchronousForm) {
  for (const int num_ranks : {1, 2, 3}) {
    test::ranks(num_ranks, [](const ProcessGroup& group) {
      const int64_t size = group.size();
      const int rank = group.rank();
      const double own = rank + 1;
      const double sum = static_cast<double>(size * (size + 1)) / 2;
      const int last = static_cast<int>(size) - 1;
      const auto empties = [&](bool wanted) {
        std::vector<at::Tensor> list;
        for (int64_t peer = 0; wanted && peer < size; ++peer) list.push_back(at::zeros({4}));
        return list;
      };
      const at::Tensor input = at::full({4}, own);
      const at::Tensor rows = at::full({size, 4}, own);
      const at::Tensor reduced = at::full({4}, own), of_root = at::full({4}, own),
                       sent = at::full({4}, own), gathered = at::zeros({size, 4}),
                       part = at::zeros({4}), taken = at::zeros({4}),
                       exchanged = at::zeros({size, 4}), split = at::zeros({size, 4});
      const auto all = empties(true);
      const auto at_root = empties(rank == last);
      auto parts = empties(rank == 0);
      for (size_t peer = 0; peer < parts.size(); ++peer)
        parts[peer].fill_(static_cast<double>(peer) + 1);
      const std::vector<int64_t> ones(static_cast<size_t>(size), 1);

      // All under way at a time; waited for in another order.
      std::vector<Work> works;
      works.push_back(group.all_reduce_async(reduced));
      works.push_back(group.reduce_async(of_root, last));
      works.push_back(group.broadcast_async(sent, last));
      works.push_back(group.all_gather_async(all, input));
      works.push_back(group.all_gather_into_async(gathered, input));
      works.push_back(group.gather_async(at_root, input, last));
      works.push_back(group.scatter_async(taken, parts));
      works.push_back(group.reduce_scatter_async(part, rows));
      works.push_back(group.all_to_all_async(exchanged, rows));
      works.push_back(group.all_to_all_async(split, rows, ones, ones));
      works.push_back(group.barrier_async("all under way"));
      for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();

      expect_all(reduced, sum, "all_reduce_async");
      if (rank == last) expect_all(of_root, sum, "reduce_async");
      expect_all(sent, static_cast<double>(size), "broadcast_async");
      for (size_t peer = 0; peer < all.size(); ++peer)
        expect_all(all[peer], static_cast<double>(peer) + 1, "all_gather_async");
      expect_rows(gathered, "all_gather_into_async");
      for (size_t peer = 0; peer < at_root.size(); ++peer)
        expect_all(at_root[peer], static_cast<double>(peer) + 1, "gather_async");
      expect_all(taken, own, "scatter_async");
      expect_all(part, sum, "reduce_scatter_async");
      expect_rows(exchanged, "all_to_all_async");
      expect_rows(split, "all_to_all_async with splits");
    });
  }
}

// Each rank sends before it receives, and receives in another order than the others send.
TEST(AsyncTest, MessagesThatCrossArrive) {
  test::ranks(3, [](const ProcessGroup& group) {
    constexpr int64_t kNumel = 1 << 18;  // More than a socket takes by itself.
    std::vector<Work> works;
    std::vector<at::Tensor> arrived;
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == group.rank()) continue;
      for (const int tag : {0, 1}) {
        works.push_back(group.send_async(at::full({kNumel}, 10.0 * group.rank() + tag), peer, tag));
      }
    }
    for (int peer = 2; peer >= 0; --peer) {
      if (peer == group.rank()) continue;
      for (const int tag : {1, 0}) {
        arrived.push_back(at::zeros({kNumel}));
        works.push_back(group.recv_async(arrived.back(), peer, tag));
      }
    }
    for (Work& work : works) work.wait();
    size_t next = 0;
    for (int peer = 2; peer >= 0; --peer) {
      if (peer == group.rank()) continue;
      for (const int tag : {1, 0}) expect_all(arrived[next++], 10.0 * peer + tag, "recv_async");
    }
  });
}

TEST(HandleTest, AnEmptyOneIsRefusedByName) {
  const ProcessGroup none;
  EXPECT_FALSE(none);
  EXPECT_EQ(none, ProcessGroup());
  const std::string text = "expected a process group, got an empty handle";
  at::Tensor x = at::ones({1});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { none.rank(); }, [&] { none.all_reduce(x); }, [&] { none.barrier("b"); },
           [&] { none.subgroup({0}, "s"); }, [&] { none.close(); }, [&] { none.store(); }})
    EXPECT_EQ(test::message_of<c10::ValueError>(call), text);
}

TEST(HandleTest, CopiesReferToOneGroup) {
  ProcessGroup group(RankInfo{});
  const ProcessGroup copy = group;
  EXPECT_EQ(copy, group);
  EXPECT_NE(copy, ProcessGroup(RankInfo{}));
  group = {};
  EXPECT_EQ(copy.all_reduce_sum(3), 3) << "lives as long as one of them";
  const ProcessGroup other = copy;
  copy.close();
  EXPECT_NE(test::message_of<c10::ValueError>([&] { other.all_reduce_sum(3); }).find("was closed"),
            std::string::npos);
}

// A sub-group keeps what it needs of the group that it was made of.
TEST(HandleTest, ASubgroupLivesOnItsOwn) {
  test::ranks(2, [](const ProcessGroup& world) {
    ProcessGroup own = world.subgroup({0, 1}, "own");
    const ProcessGroup last = own.subgroup({0, 1}, "last");
    own = {};
    EXPECT_EQ(last.all_reduce_sum(1), 2);
  });
}

// A store that is slow to answer: its rank connects after the others.
class SlowStore : public c10d::PrefixStore {
 public:
  SlowStore(milliseconds delay, c10::intrusive_ptr<c10d::Store> store)
      : PrefixStore("slow", std::move(store)), delay_(delay) {}
  std::vector<uint8_t> get(const std::string& key) override {
    std::this_thread::sleep_for(delay_);
    return PrefixStore::get(key);
  }

 private:
  const milliseconds delay_;
};

// Three ranks: all on one core; then the last one on a core of its own.
TEST(HandleTest, ABackendIsToldWhetherItsRanksHaveACoreEach) {
  test::ranks(3, [](const ProcessGroup& world) {
    const cpu_set_t all = cores_of(0);
    std::vector<int> numbers;
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &all)) numbers.push_back(core);
    const auto bind = [&](size_t index) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(numbers.at(index), &one);
      ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
      world.barrier("bound");
    };
    const auto told = std::make_shared<bool>(false);
    register_backend("spied_gloo", {.make = [told](const BackendRequest& request) {
                       *told = request.has_core_each;
                       return find_backend("gloo").make(request);
                     }});
    const auto on_host = [&](const std::function<void(const ProcessGroup&)>& body) {
      test::on_hosts(world, {"a", "a", "a"}, body, {.backend = "spied_gloo"});
    };
    on_host([&](const ProcessGroup&) { EXPECT_EQ(*told, numbers.size() >= 3); });
    bind(0);
    on_host([&](const ProcessGroup&) { EXPECT_FALSE(*told); });
    if (numbers.size() < 2) return;
    bind(world.rank() == 2 ? 1 : 0);
    on_host([&](const ProcessGroup& group) {
      EXPECT_FALSE(*told);
      const ProcessGroup last = group.subgroup({2}, "last"), two = group.subgroup({0, 1}, "two");
      EXPECT_EQ(*told, world.rank() == 2);
    });
  });
}

// The first to be connected destroys its connections while another has not begun to connect.
TEST(HandleTest, AGroupMayBeDroppedAsSoonAsItIsMade) {
  test::ranks(3, [](const ProcessGroup& world) {
    const auto delay = std::make_shared<milliseconds>(0);
    register_backend("slow_gloo", {.make = [delay](BackendRequest request) {
                       request.store = c10::make_intrusive<SlowStore>(*delay, request.store);
                       return find_backend("gloo").make(request);
                     }});
    const std::string store = world.broadcast_object(
        (std::filesystem::temp_directory_path() / ("cohort-drop-" + std::to_string(getpid())))
            .string());
    for (int round = 0; round < 18; ++round) {
      *delay = milliseconds(world.rank() == round % 3 ? 20 : 0);
      if (round < 12) {
        world.subgroup({0, 1, 2}, "dropped", {.backend = "slow_gloo"});
      } else {
        ProcessGroup({.rank = world.rank(),
                      .world_size = 3,
                      .finds_host = true,
                      .store_file = store + "-" + std::to_string(round)},
                     {.backend = "slow_gloo"});
      }
    }
    world.barrier("all have left the files");
    for (int round = 12; world.rank() == 0 && round < 18; ++round)
      std::filesystem::remove(store + "-" + std::to_string(round));
  });
}

TEST(SubgroupOptionsTest, ATimeoutIsTheSubgroupsAlone) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& world) {
    const ProcessGroup patient = world.subgroup({0, 1}, "patient");
    const ProcessGroup hasty = world.subgroup({0, 1}, "hasty", {.timeout = milliseconds(1500)});
    if (world.rank() == 1) std::this_thread::sleep_for(seconds(3));
    EXPECT_EQ(patient.all_reduce_sum(1), 2);
    std::printf("patience is rewarded\n");
    std::fflush(stdout);
    if (world.rank() == 1) std::this_thread::sleep_for(seconds(6));
    hasty.all_reduce_sum(1);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, kExitLostPeer);
    EXPECT_NE(end.output.find("patience is rewarded"), std::string::npos) << end.output;
    EXPECT_NE(end.output.find("all_reduce(sum) of group \"hasty\""), std::string::npos)
        << end.output;
  }
}

TEST(SubgroupOptionsTest, BadOnesAreRefusedBeforeAnythingIsSent) {
  test::ranks(2, [](const ProcessGroup& world) {
    EXPECT_NE(test::message_of<ConfigError>([&] {
                world.subgroup({0, 1}, "s", {.backend = "carrier-pigeon"});
              }).find("carrier-pigeon"),
              std::string::npos);
    EXPECT_EQ(test::message_of<c10::ValueError>([&] {
                world.subgroup({0, 1}, "s", {.timeout = milliseconds(0)});
              }),
              "subgroup \"s\": expected a timeout above 0 and of at most 3650 days, got 0 ms");
    EXPECT_EQ(test::message_of<c10::ValueError>([&] { world.barrier("b", milliseconds(-1)); }),
              "barrier \"b\": expected a timeout above 0 and of at most 3650 days, got -1 ms");
    EXPECT_EQ(world.all_reduce_sum(1), 2);
    EXPECT_EQ(world.subgroup({0, 1}, "s", {.backend = "gloo"}).all_reduce_sum(1), 2);
  });
}

TEST(GroupOptionsTest, TimeoutsThatNoClockCountsAreRefused) {
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                ProcessGroup(RankInfo{}, {.timeout = timeout});
              }).find("process group: expected a timeout above 0"),
              std::string::npos);
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                ProcessGroup(RankInfo{}, {.rendezvous_timeout = timeout});
              }).find("rendezvous: expected a timeout above 0"),
              std::string::npos);
  }
}

TEST(SubgroupOptionsTest, MembersMayBeNumberedAsListed) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const bool keep_order : {true, false}) {
      const ProcessGroup pair = group.subgroup({2, 0}, "pair", {.keep_order = keep_order});
      if (!pair) continue;
      EXPECT_EQ(pair.rank(), (group.rank() == 2) == keep_order ? 0 : 1);
      EXPECT_EQ(pair.global_rank(0), keep_order ? 2 : 0);
      EXPECT_EQ(pair.broadcast_object(std::to_string(group.rank()), 0), keep_order ? "2" : "0");
      const auto all = pair.all_gather(at::full({1}, group.rank(), at::kLong));
      EXPECT_EQ(all.front().item<int64_t>(), keep_order ? 2 : 0);
    }
  });
}

TEST(HostsTest, RanksOfOneMachineShareAHost) {
  test::ranks(2, [](const ProcessGroup& group) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    const std::vector<std::string> hosts = group.hosts();
    ASSERT_EQ(hosts.size(), 2);
    EXPECT_EQ(hosts[0], hosts[1]);
    EXPECT_TRUE(hosts[0].starts_with(std::string(name.data()) + "/")) << hosts[0];
    EXPECT_EQ(ProcessGroup(RankInfo{}).hosts(), std::vector{hosts[0]}) << "of one process";
  });
}

TEST(HostsTest, RanksWithDifferentHostNamesAreOnDifferentHosts) {
  test::ranks(3, [](const ProcessGroup& group) {
    test::on_hosts(group, {"left", "right", "left"}, [](const ProcessGroup& ranks) {
      const std::vector<std::string> hosts = ranks.hosts();
      ASSERT_EQ(hosts.size(), 3);
      EXPECT_EQ(hosts[0], hosts[2]);
      EXPECT_TRUE(hosts[0].starts_with("left/")) << hosts[0];
      EXPECT_TRUE(hosts[1].starts_with("right/")) << hosts[1];
      EXPECT_EQ(ranks.rank_info().local_world_size, ranks.rank() == 1 ? 1 : 2);
      EXPECT_EQ(ranks.rank_info().local_rank, ranks.rank() == 2 ? 1 : 0);
      const ProcessGroup pair = ranks.subgroup({1, 2}, "pair");
      if (!pair) return;
      EXPECT_EQ(pair.hosts(), (std::vector{hosts[1], hosts[2]}));
    });
  });
}

TEST(HostsTest, AHostNameThatIsNoneIsRefused) {
  setenv("COHORT_HOST_NAME", "left right", 1);
  EXPECT_EQ(test::message_of<ConfigError>([] { const ProcessGroup group(RankInfo{}); }),
            "COHORT_HOST_NAME=left right: expected a name without spaces and slashes");
  unsetenv("COHORT_HOST_NAME");
}

TEST(UsersStoreTest, AProgramSharesKeysThroughIt) {
  test::ranks(3, [](const ProcessGroup& world) {
    if (world.rank() == 0) world.store().set("greeting", "good morning");
    EXPECT_EQ(world.store().get_to_str("greeting"), "good morning");
    EXPECT_GT(world.store().add("count", 1), 0);
    world.barrier("counted");
    EXPECT_EQ(world.store().add("count", 0), 3);
    // Sub-groups have keys of their own.
    const ProcessGroup pair = world.subgroup({0, 1}, "pair");
    if (pair) {
      EXPECT_FALSE(pair.store().check({"greeting"}));
    }
    world.barrier("end");
  });
}

}  // namespace handles_test
}  // namespace cohort::comm
