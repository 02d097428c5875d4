// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel with each of its options, and DataParallel, on a device whose memory the
// host may not touch: the bits of the CPU, and no forward or backward waits for the device.
#include <gtest/gtest.h>
#include <optional>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/comm_hooks/local_sgd.h"
#include "cohort/parallel/comm_hooks/power_sgd.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/join.h"
#include "cohort/parallel/zero_redundancy_optimizer.h"

#include "tests/device/same_bits.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace data_parallel_device_test {

using comm::ProcessGroup;
using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;
using test::Results;

// Buffers that every forward changes, and a layer that not every forward uses.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 24));
    norm = register_module("norm", torch::nn::BatchNorm1d(24));
    extra = register_module("extra", torch::nn::Linear(24, 24));
    last = register_module("last", torch::nn::Linear(24, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::gelu(norm(first(x)));
    if (uses_extra) y = y + extra(y);
    return last(y);
  }
  torch::nn::Linear first{nullptr}, extra{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  bool uses_extra = true;
};
TORCH_MODULE(Net);

at::Tensor batch_of(int rank, int number, at::Device device) {
  return at::arange(30, at::kFloat).mul(1 + rank + 0.3 * number).cos().view({5, 6}).to(device);
}

Net net_on(at::Device device) {
  torch::manual_seed(3);
  Net net;
  net->to(device);
  return net;
}

void add_state(const Net& net, Results& results) {
  for (const auto& parameter : net->parameters()) results.push_back(parameter.detach());
  for (const auto& buffer : net->buffers()) results.push_back(buffer);
}

struct Case {
  std::string name{};
  DistributedDataParallelOptions options{};
  parallel::CommHook hook{};
  int delay = 1;                  // batches a step, all but the last in no_sync
  bool sometimes_unused = false;  // rank 0 leaves `extra` out of odd steps
  bool joins = false;             // rank r has r more batches
  bool averages = false;          // parameters, every second step
};

Results trained(const ProcessGroup& group, const Case& c) {
  Net net = net_on(group.device());
  DistributedDataParallel<Net> model(net, group, c.options);
  if (c.hook) model.register_comm_hook(c.hook);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  parallel::PeriodicModelAverager averager(group, {.period = 2});
  Results results;
  const auto run_step = [&](int step) {
    net->uses_extra = !c.sometimes_unused || group.rank() > 0 || step % 2 == 0;
    for (int i = 0; i < c.delay; ++i) {
      std::optional<parallel::NoSync> local;
      if (i + 1 < c.delay) local.emplace(model.no_sync());
      const at::Tensor x = batch_of(group.rank(), step * c.delay + i, group.device());
      const at::Tensor loss = model(x).to(at::kFloat).pow(2).mean();
      loss.backward();
      results.push_back(loss.detach());
    }
    optimizer.step();
    optimizer.zero_grad();
    if (c.averages) averager.average_parameters(model.parameters());
  };
  const int num_steps = 4 + (c.joins ? group.rank() : 0);
  const auto run_steps = [&] {
    for (int step = 0; step < num_steps; ++step) run_step(step);
  };
  if (c.joins) {
    parallel::join(model, run_steps);
  } else {
    run_steps();
  }
  add_state(net, results);
  return results;
}

parallel::CommHook power_sgd() {
  return parallel::power_sgd_hook(std::make_shared<parallel::PowerSgdState>(
      parallel::PowerSgdOptions{.matrix_approximation_rank = 2, .start_power_sgd_iter = 2}));
}

parallel::CommHook local_sgd() {
  return parallel::post_local_sgd_hook(std::make_shared<parallel::PostLocalSgdState>(
      parallel::PostLocalSgdOptions{.start_local_sgd_iter = 2}));
}

// Hooks have state: each run has its own.
std::vector<Case> cases() {
  const parallel::MixedPrecision low{
      .param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};
  std::vector<Case> all;
  all.push_back({.name = "plain"});
  all.push_back(
      {.name = "small buckets", .options = {.bucket_cap_mb = 0.001, .rebuild_buckets = true}});
  all.push_back(
      {.name = "unused", .options = {.find_unused_parameters = true}, .sometimes_unused = true});
  all.push_back({.name = "views", .options = {.gradient_as_bucket_view = true}, .delay = 2});
  all.push_back({.name = "static", .options = {.static_graph = true}});
  all.push_back({.name = "low precision", .options = {.mixed_precision = low}});
  all.push_back({.name = "delayed",
                 .options = {.delay_all_reduce_named_params = {"first.weight", "first.bias"},
                             .param_to_hook_all_reduce = "first.weight"}});
  all.push_back({.name = "join", .joins = true});
  all.push_back({.name = "fp16", .hook = parallel::fp16_compress_hook()});
  all.push_back({.name = "bf16 PowerSGD", .hook = parallel::bf16_compress_wrapper(power_sgd())});
  all.push_back({.name = "PowerSGD", .hook = power_sgd()});
  all.push_back({.name = "local SGD", .hook = local_sgd(), .averages = true});
  return all;
}

void expect_cpu_bits(const ProcessGroup& group) {
  const ProcessGroup cpu = test::on_cpu(group);
  const std::vector<Case> there = cases(), here = cases();
  for (size_t i = 0; i < there.size(); ++i) {
    SCOPED_TRACE(there[i].name);
    test::expect_same_bits(trained(group, there[i]), trained(cpu, here[i]));
  }
}

TEST(DataParallelDeviceTest, EveryOptionTrainsTwoRanksWithTheBitsOfTheCpu) {
  test::device_ranks(2, expect_cpu_bits);
}

TEST(DataParallelDeviceTest, EveryOptionTrainsThreeRanksWithTheBitsOfTheCpu) {
  test::device_ranks(3, expect_cpu_bits);
}

TEST(DataParallelDeviceTest, ZeroRedundancyOptimizerHasTheBitsOfTheCpu) {
  test::device_ranks(3, [](const ProcessGroup& group) {
    const auto run = [](const ProcessGroup& on) {
      Net net = net_on(on.device());
      DistributedDataParallel<Net> model(net, on);
      parallel::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
          model.named_parameters(), on, [](const auto& shards) {
            std::vector<at::Tensor> tensors;
            for (const auto& shard : shards) tensors.push_back(shard.tensor);
            return torch::optim::AdamW(tensors, torch::optim::AdamWOptions(0.01));
          });
      for (int step = 0; step < 3; ++step) {
        model(batch_of(on.rank(), step, on.device())).pow(2).mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      Results results;
      add_state(net, results);
      return results;
    };
    test::expect_same_bits(run(group), run(test::on_cpu(group)));
  });
}

// The numbers of docs/ddp.md; what find_unused_parameters counts lies on the host, as for every
// device of this type.
TEST(DataParallelDeviceTest, ForwardAndBackwardNeitherWaitNorCopyButTheBatch) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    const auto count = [&](const Case& c) {
      Net net = net_on(group.device());
      DistributedDataParallel<Net> model(net, group, c.options);
      if (c.hook) model.register_comm_hook(c.hook);
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
      test::DeviceCounts counts;
      for (int step = 0; step < 4; ++step) {
        net->uses_extra = !c.sometimes_unused || group.rank() > 0 || step % 2 == 0;
        test::reset_device_counts();
        model(batch_of(group.rank(), step, group.device())).pow(2).mean().backward();
        counts = test::device_counts();
        optimizer.step();
        optimizer.zero_grad();
      }
      return counts;
    };
    for (const Case& c : cases()) {
      SCOPED_TRACE(c.name);
      const test::DeviceCounts counts = count(c);
      EXPECT_EQ(counts.synchronisations, c.name.ends_with("PowerSGD") ? 2 : 0);
      EXPECT_EQ(counts.host_to_device, 1);
      EXPECT_EQ(counts.device_to_host, 0);
    }
  });
}

TEST(DataParallelDeviceTest, AModelWhereTheGroupDoesNotComputeIsRefused) {
  test::device_ranks(1, [](const ProcessGroup& group) {
    const std::string refusal = test::message_of<c10::ValueError>(
        [&] { DistributedDataParallel<Net> model(net_on(group.device()), test::on_cpu(group)); });
    EXPECT_NE(refusal.find("on mtia:0, which the group's backend gloo does not serve"),
              std::string::npos)
        << refusal;
  });
}

// Outputs, and parameters and buffers after three steps.
Results trained_in_threads(const std::vector<at::Device>& devices, at::Device output_device) {
  Net net = net_on(devices.front());
  parallel::DataParallel<Net> model(net, devices, {.output_device = output_device});
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Results results;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor output = model(batch_of(0, step, devices.front()));
    EXPECT_EQ(output.device(), output_device);
    results.push_back(output.detach());
    optimizer.zero_grad();
    output.pow(2).mean().backward();
    optimizer.step();
  }
  add_state(net, results);
  return results;
}

TEST(DataParallelDeviceTest, ReplicasInThreadsHaveTheBitsOfTheCpu) {
  const at::Device device = test::second_device(), cpu = at::kCPU;
  const Results expected = trained_in_threads({cpu, cpu}, cpu);
  test::expect_same_bits(trained_in_threads({device, device}, device), expected);
  test::expect_same_bits(trained_in_threads({device, cpu}, device), expected);
  test::expect_same_bits(trained_in_threads({device, cpu}, cpu), expected);
  test::expect_same_bits(trained_in_threads({cpu, device}, cpu), expected);
}

}  // namespace data_parallel_device_test
}  // namespace cohort
