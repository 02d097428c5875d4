// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <numeric>
#include <signal.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/shared_tensor.h"

#include "tests/support/ranks.h"

namespace cohort::comm {
namespace collectives_test {

const std::vector<at::ScalarType> kReducible{at::kByte, at::kChar,     at::kInt,   at::kLong,
                                             at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

at::Tensor filled(int64_t value, at::ScalarType type, at::IntArrayRef shape = {2, 3}) {
  return at::full(shape, value, at::TensorOptions().dtype(type));
}

void expect_all(const at::Tensor& tensor, double value, const std::string& what) {
  EXPECT_TRUE(tensor.to(at::kDouble).eq(value).all().item<bool>()) << what << " gave " << tensor;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return one_line(error);
  }
  return "no error";
}

TEST(CollectivesTest, AllReduceKnowsEveryOperationAndType) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const at::ScalarType type : kReducible) {
      const std::map<ReduceOp, double> expected{{ReduceOp::kSum, 9}, {ReduceOp::kMax, 4},
                                                {ReduceOp::kMin, 2}, {ReduceOp::kProduct, 24},
                                                {ReduceOp::kAvg, 3}, {ReduceOp::kBand, 2 & 3 & 4},
                                                {ReduceOp::kBor, 7}, {ReduceOp::kBxor, 2 ^ 3 ^ 4}};
      for (const auto& [op, value] : expected) {
        const bool bitwise = op >= ReduceOp::kBand;
        if (bitwise == at::isFloatingType(type) && (bitwise || op == ReduceOp::kAvg)) continue;
        if (op == ReduceOp::kAvg && !at::isFloatingType(type)) continue;
        at::Tensor x = filled(group.rank() + 2, type);
        group.all_reduce(x, op);
        expect_all(x, value, "all_reduce");
        at::Tensor y = filled(group.rank() + 2, type);
        group.all_reduce_async(y, op).wait();
        expect_all(y, value, "all_reduce_async");
        at::Tensor z = filled(group.rank() + 2, type);
        group.reduce(z, 1, op);
        if (group.rank() == 1) expect_all(z, value, "reduce");
        const at::Tensor parts = filled(group.rank() + 2, type, {3, 4});
        at::Tensor part = filled(0, type, {4});
        group.reduce_scatter(part, parts, op);
        expect_all(part, value, "reduce_scatter");
        expect_all(parts, group.rank() + 2, "reduce_scatter's input");
      }
    }
    at::Tensor flag = filled(group.rank() == 1 ? 1 : 0, at::kBool);
    group.all_reduce(flag, ReduceOp::kMax);
    expect_all(flag, 1, "max of bool");
    group.all_reduce(flag = filled(group.rank() == 1 ? 1 : 0, at::kBool), ReduceOp::kBand);
    expect_all(flag, 0, "band of bool");
  });
}

// `tensor` is this rank's; the calls replace it by the mean over ranks.
struct Average {
  const char* name;
  std::function<void(const ProcessGroup&, at::Tensor&)> call;
  bool on_root_only = false;
};

std::vector<Average> averages() {
  return {
      {"all_reduce", [](auto& group, auto& x) { group.all_reduce(x, ReduceOp::kAvg); }},
      {"all_reduce_async",
       [](auto& group, auto& x) { group.all_reduce_async(x, ReduceOp::kAvg).wait(); }},
      {"reduce", [](auto& group, auto& x) { group.reduce(x, 1, ReduceOp::kAvg); }, true},
  };
}

TEST(AutogradTest, AnAverageOfALossLeavesItsGradientAlone) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Average& average : averages()) {
      at::Tensor weight = at::full({2}, 1.0 + group.rank()).requires_grad_(true);
      at::Tensor loss = weight.sum();
      average.call(group, loss);
      if (group.rank() == 1 || !average.on_root_only) expect_all(loss, 4, average.name);
      loss.backward();
      EXPECT_TRUE(weight.grad().equal(at::ones({2}))) << average.name << ": " << weight.grad();
    }
  });
}

TEST(AutogradTest, AveragesOfParametersArrive) {
  test::ranks(3, [](const ProcessGroup& group) {
    for (const Average& average : averages()) {
      at::Tensor weight = at::full({2}, 1.0 + group.rank()).requires_grad_(true);
      average.call(group, weight);
      if (group.rank() == 1 || !average.on_root_only) expect_all(weight, 2, average.name);
      EXPECT_TRUE(weight.requires_grad() && weight.is_leaf()) << average.name;
      (weight * 3).sum().backward();
      EXPECT_TRUE(weight.grad().equal(at::full({2}, 3.0))) << average.name;
    }
  });
}

// The same of those that fill an output: neither its history nor its need of a gradient changes.
TEST(AutogradTest, WhatMovesDataIsNotRecorded) {
  test::ranks(2, [](const ProcessGroup& group) {
    const int rank = group.rank();
    const auto leaf = [&](at::IntArrayRef shape) {
      return at::full(shape, 1.0 + rank).requires_grad_(true);
    };
    const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor)>>> calls{
        {"broadcast", [&](at::Tensor x) { return group.broadcast(x, 1), x; }},
        {"all_gather", [&](const at::Tensor& x) { return group.all_gather(x)[1]; }},
        {"gather",
         [&](const at::Tensor& x) {
           const auto all = group.gather(x, 1);
           return rank == 1 ? all[1] : filled(2, at::kFloat, {2});
         }},
        {"scatter",
         [&](at::Tensor x) {
           group.scatter(
               x, rank == 1 ? std::vector{leaf({2}), leaf({2})} : std::vector<at::Tensor>(), 1);
           return x;
         }},
        {"all_to_all",
         [&](at::Tensor x) {
           group.all_to_all(x, at::full({2}, 2.0).requires_grad_(true));
           return x;
         }},
        {"reduce_scatter",
         [&](at::Tensor x) {
           group.reduce_scatter(x, at::full({4}, 2.0).requires_grad_(true), ReduceOp::kAvg);
           return x;
         }},
    };
    for (const auto& [name, call] : calls) {
      expect_all(call(leaf({2})), 2, name);
      at::Tensor weight = leaf({2});
      const at::Tensor result = call(weight * 1);
      expect_all(result, 2, name);
      if (!result.requires_grad()) continue;  // A fresh tensor.
      result.sum().backward();
      EXPECT_TRUE(weight.grad().equal(at::ones({2}))) << name << ": " << weight.grad();
    }
  });
}

TEST(CollectivesTest, DataMovesWhateverItsType) {
  test::ranks(3, [](const ProcessGroup& group) {
    const int rank = group.rank();
    auto types = kReducible;
    types.insert(types.end(), {at::kBool, at::kShort, at::kComplexFloat});
    for (const at::ScalarType type : types) {
      const auto value = [&](int of) { return filled(type == at::kBool ? of % 2 : of + 5, type); };
      at::Tensor x = value(rank);
      group.broadcast(x, 2);
      EXPECT_TRUE(x.equal(value(2)));
      const auto all = group.all_gather(value(rank));
      ASSERT_EQ(all.size(), 3u);
      for (int peer = 0; peer < 3; ++peer)
        EXPECT_TRUE(all[static_cast<size_t>(peer)].equal(value(peer)));
      const auto some = group.gather(value(rank), 1);
      ASSERT_EQ(some.size(), rank == 1 ? 3u : 0u);
      for (size_t peer = 0; peer < some.size(); ++peer)
        EXPECT_TRUE(some[peer].equal(value(static_cast<int>(peer))));
      std::vector<at::Tensor> parts;
      if (rank == 0) parts = {value(0), value(1), value(2)};
      at::Tensor mine = value(9);
      group.scatter(mine, parts, 0);
      EXPECT_TRUE(mine.equal(value(rank)));
      if (rank == 0) group.send(value(7), 2, 4);
      if (rank == 2) {
        group.recv(mine, 0, 4);
        EXPECT_TRUE(mine.equal(value(7)));
      }
    }
  });
}

// Gloo alone would write the other dtype's bytes, and end the process for a longer message.
TEST(CollectivesTest, AMessageOfAnotherFormIsRefusedByTheReceiver) {
  test::ranks(2, [](const ProcessGroup& group) {
    if (group.rank() == 0) {
      group.send(at::ones({6}), 1);
      group.send(at::ones({3}), 1, 1);
      group.send(at::ones({2, 3}), 1, 2);
    } else {
      at::Tensor three = at::zeros({3});
      EXPECT_EQ(error_of([&] { group.recv(three, 0); }),
                "recv from 0: expected 3 elements of float32, rank 0 sends 6 of float32");
      at::Tensor whole = at::zeros({3}, at::kInt);
      EXPECT_EQ(error_of([&] { group.recv(whole, 0, 1); }),
                "recv from 0: expected 3 elements of int32, rank 0 sends 3 of float32");
      at::Tensor six = at::zeros({6});
      group.recv(six, 0, 2);
      EXPECT_TRUE(six.equal(at::ones({6})));
    }
  });
}

TEST(CollectivesTest, AllGatherIntoKeepsTheOrderOfRanks) {
  test::ranks(3, [](const ProcessGroup& group) {
    at::Tensor output = at::empty({6}, at::kLong);
    group.all_gather_into(output, at::tensor({int64_t{group.rank()}, int64_t{10 + group.rank()}}));
    EXPECT_TRUE(output.equal(
        at::tensor({int64_t{0}, int64_t{10}, int64_t{1}, int64_t{11}, int64_t{2}, int64_t{12}})));
    output.zero_();
    Work work = group.all_gather_into_async(
        output, at::tensor({int64_t{group.rank()}, int64_t{10 + group.rank()}}));
    work.wait();
    work.wait();
    EXPECT_EQ(output[5].item<int64_t>(), 12);
  });
}

// Each rank's part is another sum, and sums in the order of ranks: bit-equal to the local one.
TEST(CollectivesTest, ReduceScatterAddsInTheOrderOfRanks) {
  test::ranks(3, [](const ProcessGroup& group) {
    std::vector<at::Tensor> inputs;
    for (int peer = 0; peer < 3; ++peer) {
      at::manual_seed(static_cast<uint64_t>(peer));
      inputs.push_back(at::rand({3, 1000}));
    }
    const at::Tensor expected = ((inputs[0] + inputs[1]) + inputs[2])[group.rank()];
    at::Tensor part = at::empty({1000});
    group.reduce_scatter(part, inputs[static_cast<size_t>(group.rank())]);
    EXPECT_TRUE(part.equal(expected));
    group.reduce_scatter(part, inputs[static_cast<size_t>(group.rank())], ReduceOp::kAvg);
    EXPECT_TRUE(part.equal(expected / 3));
  });
}

void expect_exchange_in_place(const ProcessGroup& group) {
  const int64_t size = group.size();
  at::Tensor expected;
  at::Tensor own;
  for (int peer = 0; peer < size; ++peer) {
    at::manual_seed(static_cast<uint64_t>(peer));
    const at::Tensor input = at::rand({size, 1000});
    if (peer == group.rank()) own = input.clone();
    expected = peer == 0 ? input : expected + input;
  }
  at::Tensor part = own[group.rank()];
  group.reduce_scatter(part, own);
  EXPECT_TRUE(part.equal(expected[group.rank()]));
  group.all_gather_into(own, part);
  EXPECT_TRUE(own.equal(expected));
}

// What is written to is what is read, but not this rank's part of it.
void expect_overlapping_exchange(const ProcessGroup& group) {
  const int size = group.size(), next = (group.rank() + 1) % size;
  // A number that tells rank and place.
  const auto mine = [&](int64_t numel) { return at::arange(numel) * size + group.rank(); };
  for (const int64_t width : {2, 100'003}) {
    const auto part = [&](const at::Tensor& whole, int index) {
      return whole.narrow(0, index * width, width);
    };
    const auto shared = [&](const at::Tensor& values) {
      return empty_shared(group, values.numel(), values.options()).copy_(values.flatten());
    };
    const at::Tensor gathered = at::empty({size * width}, at::kLong);
    group.all_gather_into(gathered, part(mine(size * width), next).clone());
    const at::Tensor whole = shared(mine(size * width));
    group.all_gather_into(whole, part(whole, next));
    EXPECT_TRUE(whole.equal(gathered));

    const at::Tensor reduced = at::empty({width}, at::kLong);
    group.reduce_scatter(reduced, mine(size * width));
    const at::Tensor terms = shared(mine(size * width));
    const at::Tensor across = terms.narrow(0, width / 2, width);
    group.reduce_scatter(across, terms);
    EXPECT_TRUE(across.equal(reduced));

    const at::Tensor many = shared(mine(size * width));
    std::vector<at::Tensor> outputs;
    for (int peer = 0; peer < size; ++peer) {
      if (group.rank() == size - 1) outputs.push_back(part(many, peer));
    }
    group.gather_async(outputs, part(many, 0), size - 1).wait();
    if (group.rank() == size - 1) {
      for (int peer = 0; peer < size; ++peer)
        EXPECT_TRUE(outputs[static_cast<size_t>(peer)].equal(at::arange(width) * size + peer));
    }
    many.copy_(mine(size * width));
    group.scatter(part(many, next), outputs, size - 1);
    EXPECT_TRUE(
        part(many, next).equal(part(at::arange(size * width) * size + size - 1, group.rank())));

    // Rank 0 sends and receives other numbers of rows than it has for each.
    std::vector<int64_t> to(static_cast<size_t>(size), 2), from(static_cast<size_t>(size), 2);
    if (size > 2 && group.rank() == 0) to[1] = 4, to[2] = 0, from[1] = 0, from[2] = 4;
    if (size > 2 && group.rank() == 1) from[0] = 4, to[0] = 0;
    if (size > 2 && group.rank() == 2) from[0] = 0, to[0] = 4;
    const auto count = [](const std::vector<int64_t>& splits) {
      return std::accumulate(splits.begin(), splits.end(), int64_t{0});
    };
    const at::Tensor table =
        shared(mine(std::max(count(to), count(from)) * width)).view({-1, width});
    const at::Tensor sent = table.narrow(0, 0, count(to)),
                     received = table.narrow(0, 0, count(from));
    const at::Tensor expected = at::empty_like(received);
    group.all_to_all(expected, sent.clone(), from, to);
    group.all_to_all(received, sent, from, to);
    EXPECT_TRUE(received.equal(expected));
  }
}

TEST(CollectivesTest, AnOutputMayOverlapWhatIsReadAmongTwo) {
  test::ranks(2, expect_overlapping_exchange);
}

TEST(CollectivesTest, AnOutputMayOverlapWhatIsReadAmongThree) {
  test::ranks(3, expect_overlapping_exchange);
}

TEST(CollectivesTest, OnePartOfABufferMayBeTheOtherEndAmongTwo) {
  test::ranks(2, expect_exchange_in_place);
}

TEST(CollectivesTest, OnePartOfABufferMayBeTheOtherEndAmongFour) {
  test::ranks(4, expect_exchange_in_place);
}

TEST(CollectivesTest, OnePartOfABufferMayBeTheOtherEndAlone) {
  ProcessGroup alone(RankInfo{});
  expect_exchange_in_place(alone);
}

TEST(CollectivesTest, ManyExchangesMayBeUnderWayAtOnce) {
  test::ranks(3, [](const ProcessGroup& group) {
    std::vector<at::Tensor> wholes;
    std::vector<at::Tensor> parts;
    std::vector<Work> works;
    for (int64_t i = 0; i < 8; ++i) {
      wholes.push_back(at::full({3, 1000 * (1 + i % 2)}, static_cast<double>(i + group.rank())));
      parts.push_back(at::empty({wholes.back().size(1)}));
      works.push_back(i % 3 == 0
                          ? group.reduce_scatter_async(parts.back(), wholes.back())
                          : group.all_gather_into_async(wholes.back(), parts.back().fill_(i)));
    }
    group.barrier("between");
    for (size_t i = works.size(); i-- > 0;) works[i].wait();
    for (int64_t i = 0; i < 8; ++i) {
      const auto at = static_cast<size_t>(i);
      if (i % 3 == 0) {
        expect_all(parts[at], static_cast<double>(3 * i + 3), "reduce_scatter");
      } else {
        expect_all(wholes[at], static_cast<double>(i), "all_gather");
      }
    }
  });
}

// Gloo itself would leave the end of an output as it was, or end the process.
void expect_splits_compared(const std::string& backend, int64_t expected, bool async) {
  const auto ends = test::run_ranks(
      2,
      [&](const ProcessGroup& group) {
        const bool sends_two = group.rank() == 0;
        const std::vector<int64_t> to{1, sends_two ? 2 : 1}, from{sends_two ? 1 : expected, 1};
        const at::Tensor output = at::empty({from[0] + from[1]}), input = at::ones({to[0] + to[1]});
        if (async) group.all_to_all_async(output, input, from, to).wait();
        if (!async) group.all_to_all(output, input, from, to);
      },
      {.backend = backend, .timeout = std::chrono::seconds(20)});
  const std::string text =
      "rank 1 expects " + std::to_string(4 * expected) + " bytes of rank 0, which sends 8";
  for (const test::RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, 3) << end.output;
    EXPECT_NE(end.output.find(text), std::string::npos) << end.output;
    EXPECT_NE(end.output.find("disagree"), std::string::npos) << end.output;
    EXPECT_EQ(end.output.find("lost"), std::string::npos) << end.output;
  }
}

TEST(CollectivesTest, ASplitThatIsLongerThanExpectedIsAnErrorOnEveryRank) {
  expect_splits_compared("gloo", 1, /*async=*/false);
}

TEST(CollectivesTest, ASplitThatIsShorterThanExpectedIsAnErrorOnEveryRank) {
  expect_splits_compared("gloo", 3, /*async=*/true);
}

TEST(CollectivesTest, ASplitThatIsLongerThanExpectedIsTheSameErrorOverSharedMemory) {
  expect_splits_compared("shm", 1, /*async=*/true);
}

TEST(CollectivesTest, ASplitThatIsShorterThanExpectedIsTheSameErrorOverSharedMemory) {
  expect_splits_compared("shm", 3, /*async=*/false);
}

TEST(CollectivesTest, AllToAllWithEqualAndUnequalParts) {
  test::ranks(3, [](const ProcessGroup& group) {
    const int64_t rank = group.rank();
    at::Tensor output = at::empty({3}, at::kInt);
    group.all_to_all(output, at::tensor({10 * rank, 10 * rank + 1, 10 * rank + 2}).to(at::kInt));
    EXPECT_TRUE(output.equal(at::tensor({rank, 10 + rank, 20 + rank}).to(at::kInt)));
    // Rank a sends a + b rows to rank b.
    const std::vector<int64_t> splits{rank, rank + 1, rank + 2};
    const int64_t rows = 3 * rank + 3;
    at::Tensor uneven = at::empty({rows, 2}, at::kDouble);
    group.all_to_all(uneven, at::full({rows, 2}, static_cast<double>(rank), at::kDouble), splits,
                     splits);
    int64_t row = 0;
    for (int64_t peer = 0; peer < 3; ++peer) {
      for (int64_t i = 0; i < peer + rank; ++i)
        EXPECT_EQ(uneven[row++][0].item<double>(), static_cast<double>(peer));
    }
    EXPECT_EQ(row, rows);
  });
}

TEST(CollectivesTest, TextsOfAnyLengthAndAnyBytes) {
  test::ranks(3, [](const ProcessGroup& group) {
    const std::string bytes("a\0b\xff", 4);
    EXPECT_EQ(group.broadcast_object(group.rank() == 1 ? bytes : "other", 1), bytes);
    EXPECT_EQ(group.broadcast_object(""), "");
    EXPECT_EQ(group.all_gather_object(std::string(static_cast<size_t>(group.rank()), 'x')),
              (std::vector<std::string>{"", "x", "xx"}));
    EXPECT_EQ(group.all_gather_object(""), (std::vector<std::string>{"", "", ""}));
    const auto gathered = group.gather_object("r" + std::to_string(group.rank()), 2);
    EXPECT_EQ(gathered, group.rank() == 2 ? (std::vector<std::string>{"r0", "r1", "r2"})
                                          : (std::vector<std::string>{}));
    EXPECT_EQ(group.gather_object("", 0).size(), group.rank() == 0 ? 3u : 0u);
  });
}

TEST(CollectivesTest, BadArgumentsAreNamedBeforeAnythingIsSent) {
  ProcessGroup group(RankInfo{});
  at::Tensor x = at::zeros({4, 4});
  at::Tensor shorts = at::zeros({4}, at::kShort);
  at::Tensor ints = at::zeros({4}, at::kInt);
  at::Tensor bools = at::zeros({4}, at::kBool);
  at::Tensor small = at::zeros({3});
  EXPECT_EQ(error_of([&] { group.all_reduce(shorts); }),
            "all_reduce: int16 cannot be reduced; expected bool, uint8, int8, int32, int64, "
            "float16, bfloat16, float32 or "
            "float64");
  EXPECT_EQ(error_of([&] { group.all_reduce(ints, ReduceOp::kAvg); }),
            "all_reduce(avg): expected a floating type, got int32");
  EXPECT_EQ(error_of([&] { group.reduce(ints, 0, ReduceOp::kAvg); }),
            "reduce(avg): expected a floating type, got int32");
  EXPECT_EQ(error_of([&] { group.reduce_scatter(ints, ints, ReduceOp::kAvg); }),
            "reduce_scatter(avg): expected a floating type, got int32");
  EXPECT_EQ(error_of([&] { group.all_reduce(x, ReduceOp::kBor); }),
            "all_reduce(bor): expected integers or bool, got float32");
  EXPECT_EQ(error_of([&] { group.all_reduce(bools); }),
            "all_reduce(sum): bool goes with max, min, band and bor only");
  EXPECT_EQ(error_of([&] { group.broadcast(x, 1); }),
            "broadcast: expected a root in [0, 1), got 1");
  EXPECT_EQ(error_of([&] { group.all_gather_into(x, small); }),
            "all_gather_into: expected 1 times 3 elements, got 16");
  EXPECT_EQ(
      error_of([&] { group.all_to_all(at::ones({}), at::ones({})); }),
      "all_to_all: expected output with rows in dimension 0, got a tensor without dimensions");
  EXPECT_EQ(error_of([&] { group.scatter(x, {}); }),
            "scatter: expected 1 inputs on the root and none elsewhere, got 0");
  EXPECT_EQ(error_of([&] { group.all_to_all(x, x, {3}, {4}); }),
            "all_to_all: expected 1 output splits of at least 0 that sum to 4, got 3");
  EXPECT_EQ(error_of([&] { group.all_to_all(x, small); }),
            "all_to_all: expected as many elements in the output as in the input, 3, got 16");
  EXPECT_EQ(error_of([&] { group.all_to_all(x, small, {4}, {3}); }),
            "all_to_all: rank 0 sends itself 12 bytes and expects 64");
  EXPECT_EQ(error_of([&] { group.send(x, 0); }),
            "send: expected another rank and a tag >= 0, got rank 0, tag 0");
  EXPECT_EQ(error_of([&] {
              group.subgroup({0, 0}, "twice");
            }),
            "subgroup \"twice\": expected every rank once, got 0 0");
  EXPECT_EQ(group.all_reduce_sum(4), 4);  // the group lives on
}

TEST(SubgroupTest, MembersReduceAmongThemselvesAndOthersGetNothing) {
  test::ranks(4, [](const ProcessGroup& group) {
    const auto even = group.subgroup({2, 0}, "even");
    const auto odd = group.subgroup({1, 3}, "odd");
    const bool is_even = group.rank() % 2 == 0;
    ASSERT_EQ(static_cast<bool>(even), is_even);
    ASSERT_EQ(static_cast<bool>(odd), !is_even);
    const ProcessGroup& mine = is_even ? even : odd;
    EXPECT_EQ(mine.name(), is_even ? "even" : "odd");
    EXPECT_EQ(mine.size(), 2);
    EXPECT_EQ(mine.rank(), group.rank() / 2);
    EXPECT_EQ(mine.global_rank(1), is_even ? 2 : 3);
    EXPECT_EQ(mine.all_reduce_sum(group.rank()), is_even ? 2 : 4);
    // The numbers of a sub-group's sub-group are its parent's.
    const auto last = mine.subgroup({1}, "last");
    ASSERT_EQ(static_cast<bool>(last), mine.rank() == 1);
    if (last) {
      EXPECT_EQ(last.global_rank(0), group.rank());
      EXPECT_EQ(last.all_reduce_sum(7), 7);
    }
    EXPECT_EQ(group.all_reduce_sum(1), 4);
    mine.close();
  });
}

TEST(SubgroupFaultTest, ALostRankIsNamedByItsNumberInTheJob) {
  const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
    const auto pair = group.subgroup({1, 2}, "pair");
    if (!pair) {
      group.barrier("end");
      return;
    }
    pair.all_reduce_sum(1);
    if (group.rank() == 2) kill(getpid(), SIGKILL);
    pair.all_reduce_sum(1);
  });
  EXPECT_EQ(ends[1].exit_code, 3);
  EXPECT_NE(ends[1].output.find("lost rank 2 in all_reduce(sum) of group \"pair\""),
            std::string::npos)
      << ends[1].output;
  EXPECT_EQ(ends[0].exit_code, 3);
  EXPECT_NE(ends[0].output.find("lost rank 2 in barrier \"end\""), std::string::npos)
      << ends[0].output;
}

}  // namespace collectives_test
}  // namespace cohort::comm
