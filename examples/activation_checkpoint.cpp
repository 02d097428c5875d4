// SPDX-License-Identifier: Apache-2.0
// Memory for time: a block keeps its input only, and backward computes the rest again.
//
//   $ cohort run --nproc-per-node 2 -- ./activation_checkpoint
//   blocks ran 4 times without activation checkpoints, 8 times with them
//   gradients are the same bits: yes
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/activation_checkpoint.h>
#include <cohort/parallel/distributed_data_parallel.h>

namespace parallel = cohort::parallel;

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    ++num_runs;
    return x + torch::dropout(torch::tanh(linear(x)), 0.1, is_training());
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(32, 32));
  int num_runs = 0;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool recompute_blocks) : recompute(recompute_blocks) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks)
      x = recompute ? parallel::activation_checkpoint_module(block, {}, x) : block(x);
    return x;
  }
  std::vector<Block> blocks;
  bool recompute;
};
TORCH_MODULE(Net);

// Returns how often blocks ran, and the first block's gradient.
std::pair<int, at::Tensor> run(bool recompute, const cohort::ProcessGroup& group) {
  torch::manual_seed(1);  // Dropout falls on the same elements, when it is computed again, too.
  Net net(recompute);
  parallel::DistributedDataParallel ddp(net, group);
  ddp(torch::ones({8, 32}).mul(1 + group.rank()).requires_grad_()).sum().backward();
  int num_runs = 0;
  for (const auto& block : net->blocks) num_runs += block->num_runs;
  return {num_runs, net->blocks.front()->linear->weight.grad()};
}

int train() {
  auto group = cohort::init_process_group();
  const auto [plain_runs, plain_gradient] = run(/*recompute=*/false, group);
  const auto [num_runs, gradient] = run(/*recompute=*/true, group);
  if (group.rank() == 0) {
    std::printf("blocks ran %d times without activation checkpoints, %d times with them\n",
                plain_runs, num_runs);
    std::printf("gradients are the same bits: %s\n",
                torch::equal(gradient, plain_gradient) ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("activation_checkpoint", train);
}
