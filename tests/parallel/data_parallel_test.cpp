// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "tests/support/message_of.h"

namespace cohort::parallel {
namespace data_parallel_test {

// float64 sums of some 10 terms in another order: 1e-13 is 100 times their rounding.
constexpr double kBound = 1e-13;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  NetImpl(const NetImpl& other) : torch::nn::Cloneable<NetImpl>(other) { ++num_copies; }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 6));
    second = register_module("second", torch::nn::Linear(6, 2));
    calls = register_buffer("calls", torch::zeros({}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    calls += 1;
    TORCH_CHECK(x.min().item<double>() > -1e6, "this replica has had enough");
    const torch::Tensor hidden = torch::tanh(first(x));
    return second(is_training() ? hidden : hidden * 2);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor calls;
  static inline int num_copies = 0;
};
TORCH_MODULE(Net);

struct Pair {
  torch::Tensor rows;
  torch::Tensor scalar;
};
template <class Visit>
void visit_tensors(Pair& pair, Visit&& visit) {
  visit(pair.rows);
  visit(pair.scalar);
}

struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  NestedImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1}, torch::kDouble)); }
  std::tuple<torch::Tensor, Pair> forward(const std::vector<torch::Tensor>& x, double scale) {
    return {x[0] * weight * scale, Pair{x[1], x[0].sum()}};
  }
  torch::Tensor weight;
};
TORCH_MODULE(Nested);

Net make_net() {
  torch::manual_seed(3);
  Net net;
  net->to(torch::kDouble);
  return net;
}

std::vector<c10::Device> cpus(size_t count) {
  return std::vector<c10::Device>(count, c10::Device(c10::kCPU));
}

void expect_close(const torch::Tensor& actual, const torch::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_LE((actual - expected).abs().max().item<double>(), kBound);
}

// Rows 7 on 3 replicas are chunks of 3, 3, 1; 2 rows leave one replica without work.
TEST(DataParallelTest, TrainingEqualsOneModuleInFloat64) {
  Net net = make_net();
  Net reference = make_net();
  DataParallel<Net> parallel(net, cpus(3));
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference_sgd(reference->parameters(),
                                  torch::optim::SGDOptions(0.1).momentum(0.9));
  for (const int64_t rows : {7, 7, 2, 3, 1, 8}) {
    torch::Tensor x = torch::randn({rows, 4}, torch::kDouble).requires_grad_();
    torch::Tensor reference_x = x.detach().clone().requires_grad_();
    const torch::Tensor y = parallel(x);
    const torch::Tensor reference_y = reference(reference_x);
    expect_close(y, reference_y);
    y.square().mean().backward();
    reference_y.square().mean().backward();
    expect_close(x.grad(), reference_x.grad());
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      expect_close(net->parameters()[i].grad(), reference->parameters()[i].grad());
    }
    sgd.step();
    sgd.zero_grad();
    reference_sgd.step();
    reference_sgd.zero_grad();
  }
}

TEST(DataParallelTest, TwoForwardsBeforeBackwardAddUp) {
  Net net = make_net();
  Net reference = make_net();
  DataParallel<Net> parallel(net, cpus(2));
  const torch::Tensor a = torch::randn({4, 4}, torch::kDouble);
  const torch::Tensor b = torch::randn({6, 4}, torch::kDouble);
  const torch::Tensor loss = parallel(a).sum() + parallel(b).square().sum();
  loss.backward();
  (reference(a).sum() + reference(b).square().sum()).backward();
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    expect_close(net->parameters()[i].grad(), reference->parameters()[i].grad());
  }
}

TEST(DataParallelTest, ReplicasAreMadeOnceAndFollow) {
  Net net = make_net();
  Net reference = make_net();
  NetImpl::num_copies = 0;
  DataParallel<Net> parallel(net, cpus(3));
  const torch::Tensor x = torch::randn({6, 4}, torch::kDouble);
  for (int step = 0; step < 3; ++step) {
    const torch::NoGradGuard no_grad;
    for (auto& module : {net, reference}) {
      module->first->weight.add_(0.25);
      module->second->bias.set_data(module->second->bias + 1);
    }
    expect_close(parallel(x), reference(x));
  }
  EXPECT_EQ(NetImpl::num_copies, 2);
  net->eval();
  reference->eval();
  expect_close(parallel(x), reference(x));
  EXPECT_EQ(net->calls.item<double>(), 4) << "the first device runs the module itself";
}

TEST(DataParallelTest, NoGradAndFrozenParametersMakeNoGradient) {
  Net net = make_net();
  DataParallel<Net> parallel(net, cpus(2));
  const torch::Tensor x = torch::randn({4, 4}, torch::kDouble);
  parallel(x).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(parallel(x).requires_grad())
        << "worker threads take over the caller's gradient mode";
  }
  net->first->weight.mutable_grad() = at::Tensor();
  net->first->weight.set_requires_grad(false);
  parallel(x).sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
}

TEST(DataParallelTest, NestedArgumentsAndOutputsAreCutAndJoined) {
  DataParallel<Nested> parallel(Nested(), cpus(2));
  const torch::Tensor x = torch::arange(5, torch::kDouble);
  const auto [rows, pair] = parallel(std::vector<torch::Tensor>{x, x + 1}, 2.0);
  EXPECT_TRUE(torch::equal(rows, x * 2));
  EXPECT_TRUE(torch::equal(pair.rows, x + 1));
  EXPECT_TRUE(torch::equal(pair.scalar, torch::tensor({3.0, 7.0}, torch::kDouble)))
      << "0+1+2 and 3+4";
}

TEST(DataParallelTest, TheFirstFailingReplicaIsNamed) {
  DataParallel<Net> parallel(make_net(), cpus(3));
  torch::Tensor x = torch::zeros({6, 4}, torch::kDouble);
  x.narrow(0, 2, 4).fill_(-1e7);  // replicas 1 and 2
  try {
    parallel(x);
    FAIL() << "expected an exception";
  } catch (const c10::Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("this replica has had enough"), std::string::npos) << text;
    EXPECT_NE(text.find("replica 1 on device cpu"), std::string::npos) << text;
  }
}

TEST(DataParallelTest, BadInputIsExplained) {
  EXPECT_NE(test::message_of<c10::ValueError>([] {
              DataParallel<Net>(make_net(), {});
            }).find("expected one device or more"),
            std::string::npos);
  EXPECT_NE(test::message_of<c10::ValueError>([] {
              DataParallel<Net>(make_net(), {c10::Device(c10::kMeta)});
            }).find("expected the module on the first device, meta, got a tensor on cpu"),
            std::string::npos);
  DataParallel<Nested> nested(Nested(), cpus(2));
  const torch::Tensor x = torch::ones({4}, torch::kDouble);
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              nested(std::vector<torch::Tensor>{x, x.narrow(0, 0, 3)}, 1.0);
            }).find("expected tensors of 4 rows like the first one, got [3]"),
            std::string::npos);
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              nested(std::vector<torch::Tensor>{}, 1.0);
            }).find("expected a tensor of one row or more"),
            std::string::npos);
}

TEST(SplitRowsTest, ChunksCoverTheRows) {
  for (int64_t rows = 1; rows < 12; ++rows) {
    for (size_t devices = 1; devices < 6; ++devices) {
      int64_t next = 0;
      const auto chunks = split_rows(rows, devices);
      EXPECT_LE(chunks.size(), devices);
      for (const Chunk& chunk : chunks) {
        EXPECT_EQ(chunk.start, next);
        EXPECT_GT(chunk.length, 0);
        next += chunk.length;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

}  // namespace data_parallel_test
}  // namespace cohort::parallel
