// SPDX-License-Identifier: Apache-2.0
// What a rank holds of a model under each strategy, measured. After the strategy: "disk" keeps Adam's
// moments in a file of the working folder, "recompute" computes activations again in backward.
//
//   $ cohort run --nproc-per-node 2 -- ./memory zero3 recompute
//   16797696 parameters, world size 2, zero3 recompute
//   bytes a parameter, after a step: 8.0
//   bytes a parameter, at the peak: 10.4
#include <atomic>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <memory>
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/optim/adam.h>
#include <cohort/parallel/activation_checkpoint.h>
#include <cohort/parallel/strategy.h>

namespace parallel = cohort::parallel;

// The bytes of tensors, as allocators report them on this thread and those of its backward pass.
struct TensorBytes : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    const int64_t sum = now += bytes;
    if (sum > peak) peak = sum;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::atomic<int64_t> now = 0, peak = 0;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, bool recompute_block) : recompute(recompute_block) {
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto body = [this](const at::Tensor& in) { return down(torch::gelu(up(in))); };
    return x + (recompute ? parallel::activation_checkpoint({}, body, x) : body(x));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool recompute;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool recompute) {
    for (int i = 0; i < 8; ++i) {
      const std::string name = "block" + std::to_string(i);
      blocks.push_back(register_module(name, parallel::Unit<Block>(512, recompute)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<parallel::Unit<Block>> blocks;
};
TORCH_MODULE(Net);

int train(const std::string& strategy, bool recompute, bool disk, const std::string& title) {
  const auto bytes = std::make_shared<TensorBytes>();
  const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, bytes);
  // Over shm some memory is shared between ranks: `ulimit -d` does not limit that.
  auto group = cohort::init_process_group({.backend = "gloo"});
  torch::manual_seed(1);
  Net net(recompute);
  int64_t num_parameters = 0;
  for (const at::Tensor& parameter : net->parameters()) num_parameters += parameter.numel();
  parallel::ParallelModel model(
      net, group,
      {.strategy = parallel::parse_strategy(strategy), .ddp = {.gradient_as_bucket_view = true}});
  cohort::optim::Adam adam(model.named_parameters(), {.state_folder = disk ? "." : ""});
  int64_t after_step = 0;
  for (int step = 0; step < 2; ++step) {
    bytes->peak = bytes->now.load();  // The first step is a warm-up.
    {
      const at::Tensor x = torch::randn({512, 512});
      torch::mse_loss(model(x), x.sin()).backward();
    }
    adam.step(1e-3);
    after_step = bytes->now;  // With the gradients.
    adam.zero_grad();
  }
  if (group.rank() == 0) {
    const auto a_parameter = [&](int64_t sum) { return double(sum) / double(num_parameters); };
    std::printf("%ld parameters, world size %d, %s\n", num_parameters, group.size(), title.c_str());
    std::printf("bytes a parameter, after a step: %.1f\n", a_parameter(after_step));
    std::printf("bytes a parameter, at the peak: %.1f\n", a_parameter(bytes->peak));
  }
  group.close();
  return 0;
}

int main(int argc, char** argv) {
  return cohort::run_program("memory", [&] {
    bool recompute = false, disk = false;
    std::string title = argc > 1 ? argv[1] : "ddp";
    const std::string strategy = title;
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      if (word != "recompute" && word != "disk")
        throw cohort::ConfigError("expected recompute or disk, got " + word);
      (word == "disk" ? disk : recompute) = true;
      title += " " + word;
    }
    return train(strategy, recompute, disk, title);
  });
}
