// SPDX-License-Identifier: Apache-2.0
// What the backend hierarchical promises beyond what every backend does. Ranks of one machine count as
// ranks of several hosts; the tests of collectives and of failures run over it so, too
// (COHORT_TEST_BACKEND, COHORT_TEST_HOSTS).
#include <ATen/ATen.h>
#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/comm/process_group.h"
#include "cohort/comm/shared_tensor.h"

#include "bench/collective_traffic.h"
#include "bench/sent_bytes.h"
#include "tests/support/coalesced.h"
#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_mapping.h"

namespace cohort::comm {
namespace hierarchical_test {

using Hosts = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

// Gives `body` a group whose rank r is on host `hosts[r]`.
void hierarchical_ranks(const Hosts& hosts, const std::function<void(const ProcessGroup&)>& body) {
  test::ranks(static_cast<int>(hosts.size()), [&](const ProcessGroup& group) {
    test::on_hosts(group, hosts, body, {.backend = "hierarchical"});
  });
}

// Terms whose sum depends on their order.
at::Tensor terms_of(int rank, int64_t numel, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(rank) + 7);
  return (at::randn({numel}) * at::pow(10.0, at::randint(-4, 5, {numel}))).to(type);
}

at::Tensor sum_of(const Tensors& terms) {
  const at::ScalarType type = terms[0].scalar_type();
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  at::Tensor sum = terms[0].to(half ? at::kFloat : type, /*non_blocking=*/false, /*copy=*/true);
  for (size_t i = 1; i < terms.size(); ++i) sum += terms[i].to(sum.scalar_type());
  return sum.to(type);
}

// In the order of ranks inside a host, then in the order of the hosts' first ranks; half types in
// float32 and rounded once inside, once between.
at::Tensor sum_in_order(const Hosts& hosts, int64_t numel, at::ScalarType type) {
  std::vector<Tensors> terms;
  std::map<std::string, size_t> index;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [place, is_new] = index.emplace(hosts[rank], terms.size());
    if (is_new) terms.emplace_back();
    terms[place->second].push_back(terms_of(static_cast<int>(rank), numel, type));
  }
  Tensors sums;
  for (const Tensors& host : terms) sums.push_back(sum_of(host));
  return sum_of(sums);
}

// Around the borders of small pieces of 16 KiB, and of pieces of 1 MiB of float.
const std::vector<int64_t> kLengths{0, 1, 3, 4096, 4097, 40000, 262144, 262145, 800003};

void check_sums(const Hosts& hosts) {
  hierarchical_ranks(hosts, [&](const ProcessGroup& group) {
    const int size = group.size(), rank = group.rank();
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t numel : kLengths) {
        SCOPED_TRACE(std::string(c10::toString(type)) + " of " + std::to_string(numel));
        const at::Tensor expected = sum_in_order(hosts, numel, type);
        at::Tensor x = terms_of(rank, numel, type), y = x.clone(), z = x.clone();
        EXPECT_TRUE(at::equal(group.all_reduce(x), expected));
        group.all_reduce_async(y).wait();
        EXPECT_TRUE(at::equal(y, expected)) << "in the background";
        const int root = static_cast<int>(numel) % size;
        group.reduce(z, root);
        EXPECT_TRUE(rank != root || at::equal(z, expected));
      }
      for (const int64_t part : {1, 1021, 200003}) {
        SCOPED_TRACE(std::string(c10::toString(type)) + ", parts of " + std::to_string(part));
        const at::Tensor expected =
            sum_in_order(hosts, part * size, type).narrow(0, part * rank, part);
        const at::Tensor all = terms_of(rank, part * size, type), kept = all.clone();
        at::Tensor own = at::empty({part}, type);
        group.reduce_scatter(own, all);
        EXPECT_TRUE(at::equal(own, expected));
        EXPECT_TRUE(at::equal(all, kept));
        const at::Tensor inside = all.narrow(0, part * rank, part);
        group.reduce_scatter(inside, all);
        EXPECT_TRUE(at::equal(inside, expected)) << "in place";
        const at::Tensor shared = empty_shared(group, all.numel(), type).copy_(kept);
        group.reduce_scatter(own, shared);
        EXPECT_TRUE(at::equal(own, expected)) << "read where it is";
        EXPECT_TRUE(at::equal(shared, kept));
      }
      const at::Tensor expected = sum_in_order(hosts, 800003, type);
      const at::Tensor shared =
          empty_shared(group, 800003, type).copy_(terms_of(rank, 800003, type));
      const bool shares = std::ranges::count(hosts, hosts[static_cast<size_t>(rank)]) > 1;
      EXPECT_EQ(shares_tensors(group), shares);
      EXPECT_EQ(test::shared_mapping_of(shared) != nullptr, shares);
      EXPECT_TRUE(at::equal(group.all_reduce(shared), expected)) << "summed where it is";
    }
  });
}

TEST(HierarchicalTest, SumsOfTwoHostsOfTwo) {
  check_sums({"a", "a", "b", "b"});
}
TEST(HierarchicalTest, SumsOfHostsWhoseRanksLieApart) {
  check_sums({"b", "a", "a", "b"});
}
TEST(HierarchicalTest, SumsOfHostsOfOneTwoAndThree) {
  check_sums({"c", "a", "c", "b", "a", "c"});
}
TEST(HierarchicalTest, SumsOfThreeHostsOfOne) {
  check_sums({"a", "b", "c"});
}
TEST(HierarchicalTest, SumsOfOneHost) {
  check_sums({"a", "a", "a"});
}
TEST(HierarchicalTest, SumsAlone) {
  check_sums({"a"});
}

void check_moves(const Hosts& hosts) {
  hierarchical_ranks(hosts, [](const ProcessGroup& group) {
    const int size = group.size(), rank = group.rank();
    for (const int64_t numel : {0, 1, 5000, 300007}) {
      SCOPED_TRACE(numel);
      for (int root = 0; root < size; ++root) {
        at::Tensor x = terms_of(rank, numel, at::kFloat);
        EXPECT_TRUE(at::equal(group.broadcast(x, root), terms_of(root, numel, at::kFloat)))
            << "from " << root;
      }
      const at::Tensor all = at::full({size * numel}, -1.0);
      group.all_gather_into(all, terms_of(rank, numel, at::kFloat));
      const at::Tensor filled = at::full({size * numel}, -1.0);
      const at::Tensor own = filled.narrow(0, rank * numel, numel);
      own.copy_(terms_of(rank, numel, at::kFloat));
      group.all_gather_into(filled, own);
      for (int peer = 0; peer < size; ++peer) {
        const at::Tensor theirs = terms_of(peer, numel, at::kFloat);
        EXPECT_TRUE(at::equal(all.narrow(0, peer * numel, numel), theirs)) << "of " << peer;
        EXPECT_TRUE(at::equal(filled.narrow(0, peer * numel, numel), theirs)) << "of " << peer;
      }
    }
    std::vector<Tensors> lists{{}};
    for (int peer = 0; peer < size; ++peer) lists[0].push_back(at::empty({3}));
    Tensors inputs{at::full({3}, 1.0 * rank)}, outputs{at::empty({3})};
    group.c10d_group().allgather(lists, inputs)->wait();
    group.c10d_group().reduce_scatter(outputs, lists)->wait();
    for (int peer = 0; peer < size; ++peer)
      EXPECT_TRUE(at::equal(lists[0][static_cast<size_t>(peer)], at::full({3}, 1.0 * peer)));
    EXPECT_TRUE(at::equal(outputs[0], at::full({3}, 1.0 * rank * size)));
    group.barrier("end");
  });
}

TEST(HierarchicalTest, DataOfTwoHostsOfTwo) {
  check_moves({"a", "a", "b", "b"});
}
TEST(HierarchicalTest, DataOfHostsOfOneTwoAndThree) {
  check_moves({"c", "a", "c", "b", "a", "c"});
}
TEST(HierarchicalTest, DataOfFiveHosts) {
  check_moves({"a", "b", "c", "d", "e", "b"});
}

c10d::AllreduceOptions with_op(const c10d::ReduceOp& op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

// What c10d can ask for and ProcessGroup does not.
TEST(HierarchicalTest, EveryReductionOfC10d) {
  hierarchical_ranks({"a", "b", "a"}, [](const ProcessGroup& group) {
    const auto reduced = [&](at::Tensor x, const c10d::ReduceOp& op) {
      Tensors tensors{std::move(x)};
      group.c10d_group().allreduce(tensors, with_op(op))->wait();
      return tensors[0];
    };
    const at::Tensor r = at::full({5}, group.rank() + 1.0);
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::ReduceOp::AVG), at::full({5}, 6.0F / 3)));
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::makeNCCLPreMulSum(0.5)), at::full({5}, 3.0)));
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::ReduceOp::MIN), at::full({5}, 1.0)));
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::ReduceOp::MAX), at::full({5}, 3.0)));
    EXPECT_TRUE(at::equal(reduced(r.clone(), c10d::ReduceOp::PRODUCT), at::full({5}, 6.0)));
    const at::Tensor bits = at::full({5}, 1 << group.rank(), at::kInt);
    EXPECT_TRUE(at::equal(reduced(bits.clone(), c10d::ReduceOp::BOR), at::full({5}, 7, at::kInt)));
    EXPECT_TRUE(at::equal(reduced(bits.clone(), c10d::ReduceOp::BXOR), at::full({5}, 7, at::kInt)));
    EXPECT_TRUE(at::equal(reduced(bits.clone(), c10d::ReduceOp::BAND), at::zeros({5}, at::kInt)));
    const at::Tensor is_second = at::full({5}, group.rank() == 1);
    EXPECT_TRUE(at::equal(reduced(is_second.clone(), c10d::ReduceOp::SUM), at::full({5}, true)));
    const at::Tensor complex = at::complex(r, -r);
    EXPECT_TRUE(at::equal(reduced(complex.clone(), c10d::ReduceOp::SUM),
                          at::complex(at::full({5}, 6.0), at::full({5}, -6.0))));
    at::Tensor nan = at::full({2}, group.rank() == 1 ? NAN : 1.0);
    EXPECT_TRUE(reduced(nan.clone(), c10d::ReduceOp::MAX).isnan().all().item<bool>());
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                reduced(r.clone(), c10d::ReduceOp::BXOR);
              }).find("expected integers or bool for a bitwise reduction"),
              std::string::npos);
    Tensors several{r.clone(), r.to(at::kLong), at::empty({0})};
    group.c10d_group().allreduce_coalesced(several)->wait();
    EXPECT_TRUE(at::equal(several[0], at::full({5}, 6.0)));
    EXPECT_TRUE(at::equal(several[1], at::full({5}, 6, at::kLong)));
  });
}

TEST(HierarchicalTest, CoalescedFormsAreTheirOperations) {
  hierarchical_ranks({"a", "b", "a"},
                     [](const ProcessGroup& group) { test::expect_coalesced_forms(group); });
}

// Products and minima of every small type, of more than a piece: 1 MiB of one byte each, and some.
TEST(HierarchicalTest, ReductionsOfSmallTypesInPieces) {
  hierarchical_ranks({"a", "b", "a"}, [](const ProcessGroup& group) {
    constexpr int64_t kNumel = (1 << 20) + 4099;
    for (const at::ScalarType type : {at::kChar, at::kShort, at::kBool}) {
      SCOPED_TRACE(c10::toString(type));
      const auto term_of = [&](int rank) {
        at::manual_seed(static_cast<uint64_t>(rank) + 3);
        return at::randint(type == at::kBool ? 0 : -5, type == at::kBool ? 2 : 6, {kNumel},
                           at::TensorOptions(type));
      };
      at::Tensor product = term_of(0), least = term_of(0);
      for (const int rank : {1, 2}) {
        product = type == at::kBool ? product.logical_and(term_of(rank)) : product * term_of(rank);
        least = at::minimum(least, term_of(rank));
      }
      Tensors x{term_of(group.rank())}, y{x[0].clone()};
      group.c10d_group().allreduce(x, with_op(c10d::ReduceOp::PRODUCT))->wait();
      EXPECT_TRUE(at::equal(x[0], product));
      group.c10d_group().allreduce(y, with_op(c10d::ReduceOp::MIN))->wait();
      EXPECT_TRUE(at::equal(y[0], least));
    }
  });
}

// Divided or multiplied once, by a host of two ranks and by one of one: 3 + 5 and 3 are exact, their
// third and their tenth are not.
TEST(HierarchicalTest, ScaledSumsOfHalfTypesInReduceAndReduceScatter) {
  hierarchical_ranks({"a", "b", "a"}, [](const ProcessGroup& group) {
    constexpr int64_t kPart = 300001;
    const int rank = group.rank();
    const at::Tensor sum = at::full({kPart}, 3.0F + 5 + 3);
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(c10::toString(type));
      const at::Tensor term = at::full({3 * kPart}, rank == 2 ? 5.0 : 3.0, type);
      for (const bool is_mean : {true, false}) {
        const c10d::ReduceOp op =
            is_mean ? c10d::ReduceOp(c10d::ReduceOp::AVG) : c10d::makeNCCLPreMulSum(0.1);
        const at::Tensor expected = (is_mean ? sum / 3 : sum * 0.1).to(type);
        at::Tensor own = at::empty({kPart}, type), all = term.clone();
        c10d::ReduceScatterOptions scatter;
        scatter.reduceOp = op;
        group.c10d_group()._reduce_scatter_base(own, all, scatter)->wait();
        EXPECT_TRUE(at::equal(own, expected)) << is_mean;
        for (int root = 0; root < 3; ++root) {
          Tensors x{term.narrow(0, 0, kPart).clone()};
          c10d::ReduceOptions reduce;
          reduce.reduceOp = op;
          reduce.rootRank = root;
          group.c10d_group().reduce(x, reduce)->wait();
          EXPECT_TRUE(rank != root || at::equal(x[0], expected)) << is_mean << ", to " << root;
        }
      }
    }
  });
}

TEST(HierarchicalTest, OperationsInFlightEndInOrderBeforeOneThatBlocks) {
  const Hosts hosts{"c", "a", "c", "b", "a", "c"};
  hierarchical_ranks(hosts, [&](const ProcessGroup& group) {
    for (int round = 0; round < 5; ++round) {
      const at::Tensor last = terms_of(group.rank(), 300007, at::kFloat);
      Tensors tensors;
      std::vector<Work> works;
      for (const int64_t numel : {800003, 5, 40000, 0, 262145}) {
        tensors.push_back(terms_of(group.rank(), numel, at::kFloat));
        works.push_back(group.all_reduce_async(tensors.back()));
      }
      const at::Tensor all = at::empty({6, 70001});
      works.push_back(group.all_gather_into_async(all, at::full({70001}, 1.0F * group.rank())));
      group.all_reduce(last);
      EXPECT_TRUE(at::equal(last, sum_in_order(hosts, 300007, at::kFloat)));
      for (Work& work : works) work.wait();
      for (const at::Tensor& x : tensors)
        EXPECT_TRUE(at::equal(x, sum_in_order(hosts, x.numel(), at::kFloat))) << x.numel();
      for (int rank = 0; rank < 6; ++rank)
        EXPECT_TRUE(at::equal(all[rank], at::full({70001}, 1.0F * rank)));
    }
  });
}

TEST(HierarchicalTest, AutoTakesItWhereAHostOfSeveralHasTwoRanks) {
  const auto ends =
      test::run_ranks(3,
                      [](const ProcessGroup& group) {
                        test::on_hosts(group, {"a", "b", "a"}, [](const ProcessGroup& ranks) {
                          EXPECT_EQ(ranks.backend(), "hierarchical");
                          EXPECT_EQ(ranks.all_reduce_sum(1), 3);
                          const ProcessGroup pair = ranks.subgroup({0, 1}, "one each");
                          EXPECT_TRUE(!pair || pair.backend() == "gloo");
                          const ProcessGroup host = ranks.subgroup({0, 2}, "host a");
                          EXPECT_TRUE(!host || host.backend() == "shm");
                          const ProcessGroup all = ranks.subgroup({2, 1, 0}, "all");
                          EXPECT_EQ(all.backend(), "hierarchical");
                          ranks.barrier("all are connected");
                        });
                      },
                      {.backend = "auto"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

// `traffic`: of this rank. `port`: of a store whose connections do not count.
void expect_sent_once(const std::string& what, int port, const ProcessGroup& group,
                      const bench::Traffic& traffic, const std::function<void()>& call) {
  call();  // The first one is compared.
  const int64_t before = bench::tcp_bytes_sent(port);
  call();
  EXPECT_EQ(bench::tcp_bytes_sent(port) - before, traffic.wire_bytes())
      << what << " on rank " << group.rank();
  group.barrier("counted");
}

// Two hosts of two: 2 (L-1)/L of a tensor is the tensor, and only ranks 0 and 2, the leaders, send.
// Tensors of four pieces of 1 MiB and a small one.
TEST(HierarchicalTest, BytesCrossTheNetworkOnceAHost) {
  test::ranks(4, [](const ProcessGroup& all_ranks) {
    const int port = all_ranks.rank_info().master_port;
    const auto body = [port](const ProcessGroup& group) {
      constexpr int64_t kNumel = (1 << 20) + 7, kBytes = 4 * kNumel;
      constexpr int64_t kPart = 1 << 18, kPartBytes = 4 * kPart;
      const int rank = group.rank();
      const at::Tensor x = at::ones({kNumel}), one = at::ones({kPart}), all = at::ones({4, kPart});
      const auto of = [&](const bench::Traffic& first, const bench::Traffic& second) {
        return rank == 0 ? first : rank == 2 ? second : bench::Traffic();
      };
      const auto of_both = [&](const bench::Traffic& traffic) { return of(traffic, traffic); };
      expect_sent_once("all_reduce", port, group,
                       of_both({.bytes = kBytes, .sent = 9, .received = 9}),
                       [&] { group.all_reduce(x, ReduceOp::kMax); });
      const int64_t half = (kBytes - 28) / 2;
      expect_sent_once("reduce", port, group,
                       of({.bytes = half + 28, .sent = 5, .received = 9},
                          {.bytes = kBytes, .sent = 9, .received = 5}),
                       [&] { group.reduce(x, 1, ReduceOp::kMax); });
      expect_sent_once("broadcast", port, group, of({.bytes = kBytes, .sent = 5}, {.received = 5}),
                       [&] { group.broadcast(x, 1); });
      expect_sent_once("all_gather", port, group,
                       of_both({.bytes = 2 * kPartBytes, .sent = 2, .received = 2}),
                       [&] { group.all_gather_into(all, one); });
      expect_sent_once("reduce_scatter", port, group,
                       of_both({.bytes = 2 * kPartBytes, .sent = 4, .received = 4}),
                       [&] { group.reduce_scatter(one, all); });
    };
    test::on_hosts(all_ranks, {"a", "a", "b", "b"}, body, {.backend = "hierarchical"});
  });
}

}  // namespace hierarchical_test
}  // namespace cohort::comm
