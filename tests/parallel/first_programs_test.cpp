// SPDX-License-Identifier: Apache-2.0
// The first programs of a user who knows PyTorch: a data-parallel training, then one on a mesh of three axes. What they
// compute is tested elsewhere; here their source compiles as it is, from the umbrella header, and trains.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include "cohort/cohort.h"

#include "tests/base/temporary_folder.h"
#include "tests/parallel/ddp_support.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort {
namespace first_programs_test {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {  // knows nothing of ranks
  NetImpl() {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), parallel::Unit<Block>(64)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<parallel::Unit<Block>> blocks;
  torch::nn::Linear head = register_module("head", torch::nn::Linear(64, 10));
};
TORCH_MODULE(Net);

at::Tensor loss_of(const at::Tensor& scores) {
  return (scores - 1).pow(2).mean();
}

at::Tensor batch_of(int rank, int step) {
  return at::arange(8 * 64, at::kFloat).mul(0.1 * (1 + rank) + 0.37 * step).cos().view({8, 64});
}

TEST(FirstProgramsTest, DataParallel) {
  test::ranks(2, [](const comm::ProcessGroup&) {
    auto world = init_process_group();
    torch::manual_seed(1);
    Net net;
    net->to(world.device());
    EXPECT_EQ(world.device(), at::kCPU);
    parallel::DistributedDataParallel ddp(net, world, {.gradient_as_bucket_view = true});
    torch::optim::AdamW optimizer(ddp.parameters(), 3e-4);
    std::vector<double> losses;
    for (int step = 0; step < 20; ++step) {
      auto loss = loss_of(ddp(batch_of(world.rank(), step % 2)));
      loss.backward();
      parallel::clip_grad_norm_(ddp, 1.0);
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(loss.item<double>());
    }
    EXPECT_LT(losses.back(), 0.9 * losses.front());
    world.close();
  });
}

TEST(FirstProgramsTest, AMeshOfThreeAxes) {
  test::ranks(8, [](const comm::ProcessGroup& world) {
    auto mesh = init_device_mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    torch::manual_seed(1);
    Net net;
    parallel::FullyShardedDataParallel model(net, mesh[{"dp_replicate", "dp_shard"}],
                                             {.mixed_precision = {.param_dtype = at::kBFloat16},
                                              .tensor_parallel = parallel::TensorParallelPlan{}});
    torch::optim::AdamW optimizer(model.parameters(), 3e-4);
    loss_of(model(batch_of(world.rank() / 2, 0))).backward();
    optimizer.step();
    const TemporaryFolder folder;
    {
      auto whole = model.unsharded();
      torch::save(net, folder / "net.pt");
    }
    Net loaded;
    torch::load(loaded, folder / "net.pt");
    const auto saved = loaded->named_parameters();
    EXPECT_EQ(saved.size(), 10);
    for (const parallel::LocalShard& shard : model.local_shards())
      EXPECT_TRUE(saved[shard.name].flatten().slice(0, shard.begin, shard.end).equal(shard.tensor))
          << shard.name;

    at::Tensor numbers = at::full({8}, world.rank(), at::kLong);
    world.all_reduce(numbers.narrow(0, 0, 4));
    EXPECT_TRUE(numbers.narrow(0, 0, 4).eq(28).all().item<bool>());
    EXPECT_TRUE(numbers.narrow(0, 4, 4).eq(world.rank()).all().item<bool>());
    const int next = (world.rank() + 1) % world.size();
    const int previous = (world.rank() + world.size() - 1) % world.size();
    const at::Tensor activation = at::full({3}, world.rank(), at::kFloat);
    at::Tensor received = at::empty({3});
    auto work = world.send_async(activation, next);
    world.recv(received, previous);
    work.wait();
    EXPECT_TRUE(received.eq(previous).all().item<bool>());
  });
}

// As a sampler over all ranks would give it.
TEST(FirstProgramsTest, DifferentInputsAlongTpAreRefused) {
  test::ranks(4, [](const comm::ProcessGroup& world) {
    auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto refused = [&](auto&& model) {
      test::expect_error<c10::ValueError>([&] { model(batch_of(world.rank(), 0)); },
                                          "ranks 0 and 1 along \"tp\" got different inputs");
    };
    torch::manual_seed(1);
    Net net, other;
    refused(parallel::DistributedDataParallel(net, mesh["dp"],
                                              {.tensor_parallel = parallel::TensorParallelPlan{}}));
    parallel::FullyShardedDataParallel model(other, mesh["dp"],
                                             {.tensor_parallel = parallel::TensorParallelPlan{}});
    refused(model);
  });
}

TEST(FirstProgramsTest, ACheckpointInTheBackground) {
  const test::SharedFolder shared;
  const std::string folder = shared / "run";
  test::ranks(2, [&](const comm::ProcessGroup& world) {
    torch::manual_seed(1);
    Net net;
    parallel::FullyShardedDataParallel model(net, world);
    torch::optim::AdamW optimizer(model.parameters(), 3e-4);
    loss_of(model(batch_of(world.rank(), 0))).backward();
    optimizer.step();
    auto saving = checkpoint::async_save(model, optimizer, folder);
    saving.wait();
    EXPECT_TRUE(checkpoint::load(model, optimizer, folder).missing.empty());
  });
}

}  // namespace first_programs_test
}  // namespace cohort
