// SPDX-License-Identifier: Apache-2.0
// Backward writes gradients where they travel (optim/gradient_memory.h): into buckets of ranks that share
// memory, and into the flat buffers of a sharded model.
#include "cohort/optim/gradient_memory.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <optional>
#include <stdexcept>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <vector>

#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace gradient_memory_test {

using comm::ProcessGroup;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kRanks = 3;
std::vector<const void*> taken;  // By this rank's last backwards.
bool throws = false;

// x weight^T, whose backward writes the weight's gradient where it is wanted.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    context->saved_data["weight"] =
        static_cast<int64_t>(reinterpret_cast<intptr_t>(weight.unsafeGetTensorImpl()));
    return x.mm(weight.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto key = static_cast<intptr_t>(context->saved_data["weight"].toInt());
    at::Tensor gradient = optim::take_gradient_memory(reinterpret_cast<const at::TensorImpl*>(key),
                                                      saved[1].sizes(), saved[1].scalar_type());
    if (gradient.defined()) {
      taken.push_back(gradient.const_data_ptr());
      at::mm_out(gradient, grads[0].t(), saved[0]);
    } else {
      gradient = grads[0].t().mm(saved[0]);
    }
    if (throws) throw std::runtime_error("half way");
    return {grads[0].mm(saved[1]), gradient};
  }
};

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < 3; ++i) {
      const at::Tensor values = at::arange(16, at::kDouble).add(7 * i).sin().view({4, 4});
      weights.push_back(register_parameter("weight" + std::to_string(i), values));
    }
  }
  // The first weight is used twice, the last one if asked to.
  at::Tensor forward(at::Tensor x, bool all = true) {
    x = at::tanh(Product::apply(x, weights[0]));
    x = at::tanh(Product::apply(x, weights[0]));
    x = at::tanh(Product::apply(x, weights[1]));
    return all ? Product::apply(x, weights[2]) : x;
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Chain);

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

// Of the mean over ranks of the losses of `steps`.
std::vector<at::Tensor> expected_gradients(const std::vector<int>& steps, bool all = true) {
  Chain chain;
  for (int rank = 0; rank < kRanks; ++rank)
    for (const int step : steps)
      (loss_of(chain->forward(test::batch_of(rank, step), all)) / kRanks).backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& weight : chain->weights) gradients.push_back(weight.grad());
  return gradients;
}

void expect_gradients(const Chain& chain, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i)
    test::expect_near(chain->weights[i].grad(), expected[i], std::to_string(i));
}

void forget(const Chain& chain) {
  for (const at::Tensor& weight : chain->weights) weight.mutable_grad().reset();
}

void train(const ProcessGroup& group, const DistributedDataParallelOptions& options) {
  Chain chain;
  DistributedDataParallel<Chain> ddp(chain, group, options);
  Chain outside;  // A second model, which nobody averages.
  for (int step = 0; step < 3; ++step) {
    taken.clear();
    loss_of(ddp(test::batch_of(group.rank(), step))).backward();
    EXPECT_EQ(taken.size(), 3);
    expect_gradients(chain, expected_gradients({step}));
    for (const at::Tensor& weight : {chain->weights[1], chain->weights[2]})
      EXPECT_EQ(std::ranges::count(taken, weight.grad().const_data_ptr()), 1) << "it was copied";
    forget(chain);
    taken.clear();
    loss_of(outside->forward(test::batch_of(0))).backward();
    EXPECT_TRUE(taken.empty());
  }
}

TEST(DdpGradientMemoryTest, GradientsAreThoseOfOneProcess) {
  test::ranks(kRanks,
              [](const ProcessGroup& group) {
                train(group, {.gradient_as_bucket_view = true});
                train(group, {.bucket_cap_mb_list = {1e-6}, .gradient_as_bucket_view = true});
                train(group, {.gradient_as_bucket_view = true, .rebuild_buckets = true});
                train(group, {.find_unused_parameters = true, .gradient_as_bucket_view = true});
                train(group, {.gradient_as_bucket_view = true, .static_graph = true});
              },
              {.backend = "shm"});
}

TEST(DdpGradientMemoryTest, GradientsAddUpWithinNoSync) {
  test::ranks(kRanks,
              [](const ProcessGroup& group) {
                Chain chain;
                DistributedDataParallel<Chain> ddp(chain, group, {.gradient_as_bucket_view = true});
                for (int round = 0; round < 2; ++round) {
                  for (int step = 0; step < 3; ++step) {
                    std::optional<NoSync> guard;
                    if (step < 2) guard.emplace(ddp);
                    loss_of(ddp(test::batch_of(group.rank(), step))).backward();
                  }
                  expect_gradients(chain, expected_gradients({0, 1, 2}));
                  forget(chain);
                }
              },
              {.backend = "shm"});
}

TEST(DdpGradientMemoryTest, AParameterThatIsNotUsedHasNoGradientOfBefore) {
  test::ranks(kRanks,
              [](const ProcessGroup& group) {
                Chain chain;
                DistributedDataParallel<Chain> ddp(
                    chain, group,
                    {.find_unused_parameters = true, .gradient_as_bucket_view = true});
                for (const bool all : {true, false, true}) {
                  forget(chain);
                  loss_of(ddp(test::batch_of(group.rank()), all)).backward();
                  expect_gradients(chain, expected_gradients({0}, all));
                }
              },
              {.backend = "shm"});
}

TEST(DdpGradientMemoryTest, AStepAfterABackwardThatThrewIsAsAnyOther) {
  test::ranks(kRanks,
              [](const ProcessGroup& group) {
                Chain chain;
                DistributedDataParallel<Chain> ddp(chain, group, {.gradient_as_bucket_view = true});
                throws = true;
                EXPECT_ANY_THROW(loss_of(ddp(test::batch_of(group.rank()))).backward());
                throws = false;
                forget(chain);
                loss_of(ddp(test::batch_of(group.rank(), 1))).backward();
                expect_gradients(chain, expected_gradients({1}));
              },
              {.backend = "shm"});
}

// One rank is alone on its host, and shares memory with nobody.
TEST(DdpGradientMemoryTest, RanksOfSeveralHostsAverageAlike) {
  test::ranks(kRanks, [](const ProcessGroup& world) {
    test::on_hosts(
        world, {"a", "a", "b"},
        [](const ProcessGroup& group) { train(group, {.gradient_as_bucket_view = true}); },
        {.backend = "hierarchical"});
  });
}

// c10d divides there, in a pass over the copy.
TEST(DdpGradientMemoryTest, WithoutSharedMemoryNothingIsTaken) {
  test::ranks(kRanks,
              [](const ProcessGroup& group) {
                Chain chain;
                DistributedDataParallel<Chain> ddp(chain, group, {.gradient_as_bucket_view = true});
                taken.clear();
                loss_of(ddp(test::batch_of(group.rank()))).backward();
                EXPECT_TRUE(taken.empty());
                expect_gradients(chain, expected_gradients({0}));
              },
              {.backend = "gloo"});
}

void expect_shards(const FullyShardedDataParallel<Chain>& model,
                   const std::vector<at::Tensor>& expected) {
  for (const LocalShard& shard : model.local_shards()) {
    const at::Tensor& whole = expected[static_cast<size_t>(shard.name.back() - '0')];
    test::expect_near(shard.tensor.grad(),
                      whole.reshape({-1}).narrow(0, shard.begin, shard.end - shard.begin),
                      shard.name);
  }
}

void train_sharded(const ProcessGroup& group, Shard shard) {
  Chain chain;
  FullyShardedDataParallel<Chain> model(chain, group, {.shard = shard});
  for (int round = 0; round < 2; ++round) {
    taken.clear();
    loss_of(model(test::batch_of(group.rank(), round))).backward();
    EXPECT_EQ(taken.size(), 3);
    expect_shards(model, expected_gradients({round}));
    model.zero_grad();
    // Within no_sync gradients wait where they are made.
    taken.clear();
    for (int step = 0; step < 3; ++step) {
      std::optional<NoSync> guard;
      if (step < 2) guard.emplace(model);
      loss_of(model(test::batch_of(group.rank(), step))).backward();
      EXPECT_TRUE(taken.empty()) << step;
    }
    expect_shards(model, expected_gradients({0, 1, 2}));
    model.zero_grad();
    throws = true;
    EXPECT_ANY_THROW(loss_of(model(test::batch_of(group.rank()))).backward());
    throws = false;
    model.zero_grad();
  }
}

TEST(ShardedGradientMemoryTest, GradientsAreThoseOfOneProcess) {
  test::ranks(kRanks, [](const ProcessGroup& group) {
    for (const Shard shard : {Shard::kOptimizer, Shard::kGradients, Shard::kParameters})
      train_sharded(group, shard);
  });
}

TEST(ShardedGradientMemoryTest, OverGlooToo) {
  test::ranks(kRanks, [](const ProcessGroup& group) { train_sharded(group, Shard::kParameters); },
              {.backend = "gloo"});
}

}  // namespace gradient_memory_test
}  // namespace cohort::parallel
