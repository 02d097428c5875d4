// SPDX-License-Identifier: Apache-2.0
// Every operation of the MPI backend against values computed locally. mpirun starts this program;
// all ranks run all cases.
#include <cstdlib>
#include <gtest/gtest.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/listen.h"
#include "cohort/comm/process_group.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace mpi_ranks_test {

using Tensors = std::vector<at::Tensor>;
using c10d::ReduceOp;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16, at::kBool,
                                     at::kByte,  at::kChar,   at::kShort, at::kInt,      at::kLong};

int variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}
const int own_rank = variable("OMPI_COMM_WORLD_RANK");
const int world = variable("OMPI_COMM_WORLD_SIZE");

c10::intrusive_ptr<c10d::Store> store() {
  static const auto instance =
      c10::make_intrusive<c10d::FileStore>(std::getenv("COHORT_TEST_STORE"), world);
  return instance;
}

BackendPtr connect(const std::string& name, int rank, int world_size,
                   std::chrono::milliseconds timeout) {
  return find_backend("mpi").make({.store = c10::make_intrusive<c10d::PrefixStore>(name, store()),
                                   .rank = rank,
                                   .world_size = world_size,
                                   .timeout = timeout,
                                   .address = "127.0.0.1",
                                   .interface = ""});
}

// What rank `rank` brings: small integers, exact in every dtype.
at::Tensor value(int rank, at::ScalarType dtype, int64_t n = 100) {
  return (at::arange(n, at::kLong) + rank).remainder(3).to(dtype);
}

std::string label(at::ScalarType dtype, const char* what) {
  return std::string(what) + " of " + c10::toString(dtype);
}

// Every case gets a group of its own on all ranks.
class MpiBackendTest : public testing::Test {
 protected:
  static inline int number = 0;
  BackendPtr backend =
      connect("case" + std::to_string(number++), own_rank, world, std::chrono::seconds(30));
};

using MpiCollectivesTest = MpiBackendTest;

TEST_F(MpiCollectivesTest, AllReduceOfEveryTypeAndOperation) {
  for (const auto dtype : kTypes) {
    const bool integral = c10::isIntegralType(dtype, true);
    for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                          ReduceOp::AVG, ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
      if (op == ReduceOp::AVG ? integral : (op >= ReduceOp::BAND && !integral)) continue;
      at::Tensor expected = value(0, dtype);
      for (int rank = 1; rank < world; ++rank) {
        const at::Tensor other = value(rank, dtype);
        if (op == ReduceOp::SUM || op == ReduceOp::AVG) expected = expected + other;
        if (op == ReduceOp::PRODUCT) expected = expected * other;
        if (op == ReduceOp::MIN) expected = at::minimum(expected, other);
        if (op == ReduceOp::MAX) expected = at::maximum(expected, other);
        if (op == ReduceOp::BAND) expected = expected.bitwise_and(other);
        if (op == ReduceOp::BOR) expected = expected.bitwise_or(other);
        if (op == ReduceOp::BXOR) expected = expected.bitwise_xor(other);
      }
      if (op == ReduceOp::AVG) expected = expected.div(world);
      Tensors tensors{value(own_rank, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      backend->allreduce(tensors, options)->wait();
      EXPECT_TRUE(at::equal(tensors[0], expected)) << label(dtype, "all_reduce") << " by " << op;
    }
  }
}

TEST_F(MpiCollectivesTest, AllReduceCoalescedMixesTypes) {
  Tensors tensors{value(own_rank, at::kFloat, 7), value(own_rank, at::kLong, 0),
                  value(own_rank, at::kHalf, 1000)};
  Tensors expected{value(0, at::kFloat, 7), value(0, at::kLong, 0), value(0, at::kHalf, 1000)};
  for (int rank = 1; rank < world; ++rank) {
    expected[0] += value(rank, at::kFloat, 7);
    expected[2] += value(rank, at::kHalf, 1000);
  }
  backend->allreduce_coalesced(tensors, {})->wait();
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(tensors[i], expected[i])) << i;
}

TEST_F(MpiCollectivesTest, BroadcastReduceAndGatherFromEveryRoot) {
  for (const auto dtype : kTypes) {
    at::Tensor sum = value(0, dtype);
    for (int rank = 1; rank < world; ++rank) sum = sum + value(rank, dtype);
    for (int root = 0; root < world; ++root) {
      Tensors told{value(own_rank, dtype)};
      backend->broadcast(told, {.rootRank = root})->wait();
      EXPECT_TRUE(at::equal(told[0], value(root, dtype))) << label(dtype, "broadcast");

      Tensors reduced{value(own_rank, dtype)};
      backend->reduce(reduced, {.reduceOp = ReduceOp::SUM, .rootRank = root})->wait();
      EXPECT_TRUE(at::equal(reduced[0], own_rank == root ? sum : value(own_rank, dtype)))
          << label(dtype, "reduce");

      Tensors own{value(own_rank, dtype)};
      std::vector<Tensors> gathered;
      if (own_rank == root) gathered.emplace_back();
      for (int rank = 0; rank < world && own_rank == root; ++rank)
        gathered[0].push_back(at::zeros_like(own[0]));
      backend->gather(gathered, own, {.rootRank = root})->wait();
      for (int rank = 0; rank < world && own_rank == root; ++rank) {
        EXPECT_TRUE(at::equal(gathered[0][static_cast<size_t>(rank)], value(rank, dtype)))
            << label(dtype, "gather");
      }

      Tensors got{at::zeros_like(own[0])};
      std::vector<Tensors> parts;
      if (own_rank == root) parts.emplace_back();
      for (int rank = 0; rank < world && own_rank == root; ++rank)
        parts[0].push_back(value(rank + root, dtype));
      backend->scatter(got, parts, {.rootRank = root})->wait();
      EXPECT_TRUE(at::equal(got[0], value(own_rank + root, dtype))) << label(dtype, "scatter");
    }
  }
}

TEST_F(MpiCollectivesTest, AllGatherBothForms) {
  for (const auto dtype : kTypes) {
    Tensors own{value(own_rank, dtype).view({4, 25})};
    std::vector<Tensors> lists(1);
    Tensors expected;
    for (int rank = 0; rank < world; ++rank) {
      lists[0].push_back(at::zeros_like(own[0]));
      expected.push_back(value(rank, dtype).view({4, 25}));
    }
    backend->allgather(lists, own, {})->wait();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(lists[0][i], expected[i])) << label(dtype, "all_gather");
    at::Tensor flat = at::zeros({4 * world, 25}, dtype);
    backend->_allgather_base(flat, own[0], {})->wait();
    EXPECT_TRUE(at::equal(flat, at::cat(expected))) << label(dtype, "all_gather_into_tensor");
  }
}

TEST_F(MpiCollectivesTest, ReduceScatterBothForms) {
  for (const auto dtype : kTypes) {
    std::vector<Tensors> lists(1);
    at::Tensor expected = value(own_rank, dtype);
    for (int rank = 0; rank < world; ++rank) {
      lists[0].push_back(value(own_rank + rank, dtype));
      if (rank > 0) expected = expected + value(own_rank + rank, dtype);
    }
    Tensors out{at::zeros_like(expected)};
    backend->reduce_scatter(out, lists, {})->wait();
    EXPECT_TRUE(at::equal(out[0], expected)) << label(dtype, "reduce_scatter");
    at::Tensor flat = at::cat(lists[0]);
    at::Tensor again = at::zeros_like(expected);
    backend->_reduce_scatter_base(again, flat, {})->wait();
    EXPECT_TRUE(at::equal(again, expected)) << label(dtype, "reduce_scatter_tensor");
  }
  // The mean of whole numbers that add up to a multiple of the size.
  at::Tensor mean = at::zeros({3});
  at::Tensor flat = at::full({3 * world}, 2.0);
  c10d::ReduceScatterOptions options;
  options.reduceOp = ReduceOp::AVG;
  backend->_reduce_scatter_base(mean, flat, options)->wait();
  EXPECT_TRUE(at::equal(mean, at::full({3}, 2.0)));
}

TEST_F(MpiCollectivesTest, AllToAllBothFormsWithUnevenSplits) {
  for (const auto dtype : kTypes) {
    // Rank r sends r + p rows of its value to rank p.
    std::vector<int64_t> sent, received;
    Tensors inputs, expected, outputs;
    for (int peer = 0; peer < world; ++peer) {
      sent.push_back(own_rank + peer);
      received.push_back(peer + own_rank);
      inputs.push_back(value(own_rank + 2 * peer, dtype, 5 * (own_rank + peer)).view({-1, 5}));
      expected.push_back(value(peer + 2 * own_rank, dtype, 5 * (own_rank + peer)).view({-1, 5}));
      outputs.push_back(at::zeros_like(expected.back()));
    }
    at::Tensor input = at::cat(inputs);
    at::Tensor output = at::zeros_like(at::cat(expected));
    backend->alltoall(outputs, inputs, {})->wait();
    for (size_t i = 0; i < outputs.size(); ++i)
      EXPECT_TRUE(at::equal(outputs[i], expected[i])) << label(dtype, "all_to_all");
    backend->alltoall_base(output, input, received, sent, {})->wait();
    EXPECT_TRUE(at::equal(output, at::cat(expected))) << label(dtype, "all_to_all_single");
  }
  std::vector<int64_t> none;
  at::Tensor even = at::full({world}, own_rank * 1.0);
  at::Tensor out = at::zeros({world});
  backend->alltoall_base(out, even, none, none, {})->wait();
  EXPECT_TRUE(at::equal(out, at::arange(world, at::kFloat)));
}

TEST_F(MpiBackendTest, MessagesGoRoundWhoeverReceivesFirst) {
  const int next = (own_rank + 1) % world;
  const int previous = (own_rank + world - 1) % world;
  for (const auto dtype : kTypes) {
    Tensors in{at::zeros({100}, dtype)};
    Tensors out{value(own_rank, dtype)};
    // All ranks ask before any sends: works only if the thread does not wait for one before it
    // starts the next.
    const auto received = backend->recv(in, previous, 5);
    const auto sent = backend->send(out, next, 5);
    received->wait();
    sent->wait();
    EXPECT_TRUE(at::equal(in[0], value(previous, dtype))) << label(dtype, "recv");
  }
}

TEST_F(MpiBackendTest, TagsAreKeptApartAndAnySourceIsNamed) {
  if (own_rank == 0) {
    Tensors second{at::zeros({1})}, first{at::zeros({1})};
    backend->recv(second, 1, 2)->wait();
    backend->recv(first, 1, 1)->wait();
    EXPECT_EQ(first[0].item<float>(), 1);
    EXPECT_EQ(second[0].item<float>(), 2);
    for (int i = 1; i < world; ++i) {
      Tensors any{at::zeros({1})};
      const auto work = backend->recvAnysource(any, 3);
      work->wait();
      EXPECT_EQ(any[0].item<float>(), static_cast<float>(work->sourceRank()));
      EXPECT_GT(work->sourceRank(), 0);
    }
  } else {
    Tensors one{at::ones({1})}, two{at::full({1}, 2.0)}, own{at::full({1}, own_rank * 1.0)};
    if (own_rank == 1) {
      backend->send(one, 0, 1)->wait();
      backend->send(two, 0, 2)->wait();
    }
    backend->send(own, 0, 3)->wait();
  }
  backend->barrier(c10d::BarrierOptions{})->wait();
}

TEST_F(MpiBackendTest, ManyOperationsAtOnceAndTheirFutures) {
  Tensors tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 50; ++i) {
    tensors.push_back(at::full({1000 + i}, i * 1.0));
    Tensors one{tensors.back()};
    works.push_back(backend->allreduce(one, {}));
  }
  for (int i = 49; i >= 0; --i) {
    const auto future = works[static_cast<size_t>(i)]->getFuture();
    future->wait();
    const at::Tensor result = future->value().toTensorVector().at(0);
    EXPECT_TRUE(at::equal(result, at::full({1000 + i}, i * 1.0 * world))) << i;
    EXPECT_TRUE(works[static_cast<size_t>(i)]->wait());
    EXPECT_EQ(works[static_cast<size_t>(i)]->result().at(0).data_ptr(),
              tensors[static_cast<size_t>(i)].data_ptr());
  }
}

TEST_F(MpiBackendTest, AGroupMayBePartOfTheWorldInAnyOrder) {
  // The last rank and rank 0, the other way round; with two ranks that would be the world, which
  // has one order only.
  const bool inside = own_rank == 0 || own_rank == world - 1;
  if (world > 2 && inside) {
    const auto part = connect("part", own_rank == 0 ? 1 : 0, 2, std::chrono::seconds(30));
    Tensors told{at::full({2}, own_rank)};
    part->broadcast(told, {.rootRank = 0})->wait();
    EXPECT_TRUE(at::equal(told[0], at::full({2}, world - 1)));
    Tensors sum{at::full({2}, own_rank)};
    part->allreduce(sum, {})->wait();
    EXPECT_TRUE(at::equal(sum[0], at::full({2}, world - 1)));
  }
  backend->barrier(c10d::BarrierOptions{})->wait();
}

TEST_F(MpiBackendTest, BadTensorsAreRefusedBeforeAnythingIsSent) {
  const auto has = [](const std::string& whole, const std::string& part) {
    return whole.find(part) != std::string::npos;
  };
  Tensors across{at::zeros({3, 4}).t()};
  EXPECT_TRUE(has(test::message_of<c10::ValueError>([&] { backend->broadcast(across, {}); }),
                  "mpi broadcast: expected a dense contiguous CPU tensor"));
  Tensors complex{at::zeros({2}, at::kComplexFloat)};
  EXPECT_TRUE(has(test::message_of<c10::ValueError>([&] { backend->allreduce(complex, {}); }),
                  "backend mpi reduces float, double, half"));
  Tensors whole{at::zeros({2}, at::kInt)};
  c10d::AllreduceOptions mean;
  mean.reduceOp = ReduceOp::AVG;
  EXPECT_TRUE(has(test::message_of<c10::ValueError>([&] { backend->allreduce(whole, mean); }),
                  "backend mpi has no reduction avg of Int"));
  EXPECT_TRUE(has(
      test::message_of<c10::ValueError>([&] { backend->broadcast(whole, {.rootRank = world}); }),
      "mpi broadcast: expected a rank in [0, "));
  std::vector<Tensors> short_list{{whole[0]}};
  EXPECT_TRUE(
      has(test::message_of<c10::ValueError>([&] { backend->allgather(short_list, whole, {}); }),
          "mpi allgather: expected "));
  backend->barrier(c10d::BarrierOptions{})->wait();
}

// A group of the library on backend `name`; rank 0 chooses the port and tells it through the file.
ProcessGroup group_on(const std::string& name, const ProcessGroupOptions& options) {
  const std::string key = "port/" + name;
  RankInfo info{.rank = own_rank,
                .world_size = world,
                .local_rank = own_rank,
                .local_world_size = world,
                .master_addr = "127.0.0.1",
                .source = "test"};
  if (own_rank == 0) {
    info.store_fd = listen_on(0);
    store()->set(key, std::to_string(port_of(*info.store_fd)));
  }
  info.master_port = std::stoi(store()->get_to_str(key));
  return ProcessGroup(info, options);
}

// Trains a small model and returns its weights after a few steps.
at::Tensor train_on(const std::string& name) {
  ProcessGroup group = group_on(name, {.backend = name});
  torch::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 2));
  model->to(at::kDouble);
  parallel::DistributedDataParallel ddp(model, group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 5; ++step) {
    torch::manual_seed(100 * step + own_rank);
    const at::Tensor x = torch::randn({4, 6}, at::kDouble);
    optimizer.zero_grad();
    ddp(x).square().mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model->parameters()) flat.push_back(parameter.detach().view(-1));
  group.close();
  return at::cat(flat);
}

TEST(MpiDdpTest, TrainingEqualsGloo) {
  const at::Tensor mpi = train_on("mpi");
  const at::Tensor gloo = train_on("gloo");
  // Two ranks add in one order only. With more, the orders may differ: a few roundings of numbers
  // below 10 a step.
  const double bound = world == 2 ? 0 : 5 * world * 10 * 2.3e-16;
  EXPECT_LE((mpi - gloo).abs().max().item<double>(), bound);
}

// Alone, without mpirun: ranks that only the environment knows.
TEST(MpiRankInfo, AProgramThatMpirunDidNotStartIsToldSo) {
  try {
    find_backend("mpi").make({.store = c10::make_intrusive<c10d::HashStore>(),
                              .rank = 1,
                              .world_size = 2,
                              .timeout = std::chrono::seconds(5),
                              .address = "",
                              .interface = ""});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error),
              "backend mpi: this process is rank 1 of 2, but MPI says rank 0 of 1: start the "
              "program with mpirun -n 2, and "
              "let it find its rank there");
  }
}

TEST(MpiRankInfo, OneProcessAloneIsToldSoToo) {
  const std::string error = test::message_of<ConfigError>([] {
    find_backend("mpi").make({.store = c10::make_intrusive<c10d::HashStore>(),
                              .rank = 0,
                              .world_size = 1,
                              .timeout = std::chrono::seconds(5),
                              .address = "",
                              .interface = ""});
  });
  EXPECT_EQ(error,
            "backend mpi: no mpirun started this process: start the program with mpirun -n 1");
}

TEST(MpiThreads, AProgramThatInitialisedMpiForOneThreadIsToldSo) {
  ASSERT_EQ(MPI_Init(nullptr, nullptr), MPI_SUCCESS);
  const auto of_group = [] { connect("threads", own_rank, world, std::chrono::seconds(5)); };
  const std::string expected =
      "the program initialised MPI for one thread only: backend mpi needs MPI_THREAD_MULTIPLE";
  EXPECT_EQ(test::message_of<ConfigError>(of_group), expected);
  EXPECT_EQ(test::message_of<ConfigError>(of_group), expected) << "asked again";
  MPI_Finalize();
}

// Rank 1 stays away from the sum. Both end with a failure, so that MPI is not finalised and mpirun
// ends the job.
TEST(MpiFault, APeerThatDoesNotComeIsATimeout) {
  const auto backend = connect("fault", own_rank, world, std::chrono::seconds(30));
  backend->setTimeout(std::chrono::milliseconds(700));
  Tensors tensors{at::ones({1 << 20})};
  if (own_rank == 0) {
    const auto work = backend->allreduce(tensors, {});
    try {
      work->wait();
    } catch (const c10::DistBackendError& error) {
      if (work->getFuture()->hasError())
        std::fprintf(stderr, "rank 0: %s\n", one_line(error).c_str());
    }
    std::exit(3);
  }
  sleep(50);
  FAIL() << "mpirun has not ended this rank";
}

// The dead job's way out: what waits ends at once, not at its timeout.
TEST(MpiAbort, WhatWaitsEndsAtOnce) {
  const auto backend = connect("abort", own_rank, world, std::chrono::seconds(30));
  if (own_rank == 0) {
    Tensors tensors{at::ones({1 << 20})};
    const auto start = std::chrono::steady_clock::now();
    const auto work = backend->allreduce(tensors, {});
    backend->abort();
    try {
      work->wait();
    } catch (const c10::DistBackendError& error) {
      if (std::chrono::steady_clock::now() - start < std::chrono::seconds(20))
        std::fprintf(stderr, "rank 0: %s\n", one_line(error).c_str());
    }
    std::exit(3);
  }
  sleep(50);
  FAIL() << "mpirun has not ended this rank";
}

// More than a piece of 1 GiB: what MPI could not count in one call of its.
TEST(MpiLarge, MessagesAboveOnePiece) {
  const auto backend = connect("large", own_rank, world, std::chrono::minutes(5));
  const int64_t n = (int64_t{1} << 30) + 12345;
  Tensors tensors{at::full({n}, own_rank + 1, at::kByte)};
  backend->allreduce(tensors, {})->wait();
  EXPECT_TRUE(tensors[0].eq(3).all().item<bool>());
  tensors[0].fill_(own_rank + 5);
  backend->broadcast(tensors, {.rootRank = 1})->wait();
  EXPECT_TRUE(tensors[0].eq(6).all().item<bool>());
  if (own_rank == 0) tensors[0][n - 1] = 9;
  (own_rank == 0 ? backend->send(tensors, 1, 0) : backend->recv(tensors, 0, 0))->wait();
  EXPECT_EQ(tensors[0][n - 1].item<int>(), 9);
  tensors[0].fill_(own_rank + 1);
  at::Tensor all = at::zeros({2 * n}, at::kByte);
  backend->_allgather_base(all, tensors[0], {})->wait();
  EXPECT_TRUE(all.narrow(0, 0, n).eq(1).all().item<bool>() &&
              all.narrow(0, n, n).eq(2).all().item<bool>());
  backend->_reduce_scatter_base(tensors[0], all, {})->wait();
  EXPECT_TRUE(tensors[0].eq(2 * (own_rank + 1)).all().item<bool>());
}

}  // namespace mpi_ranks_test
}  // namespace cohort::comm

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
