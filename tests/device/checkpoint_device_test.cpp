// SPDX-License-Identifier: Apache-2.0
// Checkpoints of models on a device whose memory the host may not touch: what either of device and
// CPU saved, either loads, on other numbers of ranks, and continues with the same bits.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/strategy.h"
#include "cohort/train/model_checkpoint.h"

#include "tests/device/same_bits.h"
#include "tests/support/shared_folder.h"

namespace cohort::checkpoint {
namespace checkpoint_device_test {

using comm::ProcessGroup;
using test::Results;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(5, 7));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(7, 3));
  at::Tensor steps = register_buffer("steps", at::zeros({}));
  at::Tensor frozen = register_parameter("frozen", at::ones({3}), /*requires_grad=*/false);
};
TORCH_MODULE(Net);

using Model = parallel::ParallelModel<Net>;

// A model with an optimizer, on the group's device.
struct Training {
  Training(const ProcessGroup& group, const parallel::StrategyOptions& options, int seed)
      : device(group.device()), net(net_of(seed)), model(net, group, options) {}
  Net net_of(int seed) const {
    torch::manual_seed(static_cast<uint64_t>(seed));
    Net made;
    made->to(device);
    return made;
  }
  void step() {
    const at::Tensor x = at::arange(20, at::kFloat).cos().view({4, 5}).to(device);
    model(x).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Results state() {
    Results results{net->steps.clone()};
    const auto whole = model.unsharded();
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.device(), device);
      results.push_back(parameter.detach().clone());
    }
    return results;
  }

  at::Device device;
  Net net;
  Model model;
  torch::optim::AdamW optimizer{model.parameters(), torch::optim::AdamWOptions(0.01)};
};

std::vector<parallel::StrategyOptions> all_options() {
  using parallel::Strategy;
  return {{.strategy = Strategy::kDdp},
          {.strategy = Strategy::kZero1},
          {.strategy = Strategy::kZero3},
          {.strategy = Strategy::kZero3, .sharding = {.cpu_offload = true}}};
}

// Saves after two steps, in the foreground and in the background, while the third runs.
void save_all(const ProcessGroup& group, const std::string& path) {
  const auto options = all_options();
  for (size_t i = 0; i < options.size(); ++i) {
    Training training(group, options[i], 1);
    for (int step = 0; step < 2; ++step) training.step();
    training.net->steps.fill_(2);
    const std::string folder = path + std::to_string(i);
    save(training.model, training.optimizer, folder, {.step = 2});
    SaveHandle handle =
        async_save(training.model, training.optimizer, folder + "-async", {.step = 2});
    training.step();
    handle.wait();
  }
}

// After the load, and after two more steps.
Results resumed(const ProcessGroup& group, const parallel::StrategyOptions& options,
                const std::string& path) {
  Training training(group, options, 2);
  training.step();
  load(training.model, training.optimizer, path);
  Results results = training.state();
  for (int step = 0; step < 2; ++step) training.step();
  for (const at::Tensor& tensor : training.state()) results.push_back(tensor);
  return results;
}

void resume_all(const ProcessGroup& group, const test::SharedFolder& folder) {
  const ProcessGroup cpu = test::on_cpu(group);
  const auto options = all_options();
  for (size_t i = 0; i < options.size(); ++i) {
    SCOPED_TRACE(i);
    // Of another wrapper, too, than that which loads.
    const size_t saved = (i + static_cast<size_t>(group.size())) % options.size();
    const std::string number = std::to_string(saved);
    const Results expected = resumed(cpu, options[i], folder / ("cpu" + number));
    for (const std::string by : {"cpu", "device"}) {
      test::expect_same_bits(resumed(group, options[i], folder / (by + number)), expected);
      test::expect_same_bits(resumed(cpu, options[i], folder / (by + number + "-async")), expected);
    }
  }
}

TEST(CheckpointDeviceTest, DeviceAndCpuLoadWhatEitherSavedOnAnyNumberOfRanks) {
  const test::SharedFolder folder;
  for (const int count : {2, 1, 3}) {
    test::device_ranks(count, [&](const ProcessGroup& group) {
      if (group.size() == 2) {
        save_all(group, folder / "device");
        save_all(test::on_cpu(group), folder / "cpu");
      }
      resume_all(group, folder);
    });
  }
}

}  // namespace checkpoint_device_test
}  // namespace cohort::checkpoint
