// SPDX-License-Identifier: Apache-2.0
// FSDP: parameters, gradients and optimizer state are sharded; each block is gathered while it runs.
//
//   $ cohort run --nproc-per-node 2 -- ./fsdp
//   rank 0 holds 8416 of 16801 elements
//   every parameter equals one process's: yes
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/clip_grad.h>
#include <cohort/parallel/sharding/fully_sharded_data_parallel.h>

namespace parallel = cohort::parallel;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : up(width, 2 * width), down(2 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      // A unit is gathered as one. Without a wrapper around the model it is a plain block.
      blocks.push_back(register_module("block" + std::to_string(i), parallel::Unit<Block>(32)));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<parallel::Unit<Block>> blocks;
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, 1));
};
TORCH_MODULE(Net);

int train() {
  auto group = cohort::init_process_group();
  torch::manual_seed(1);
  Net net, alone;
  for (size_t i = 0; i < net->parameters().size(); ++i)
    alone->parameters()[i].data().copy_(net->parameters()[i]);
  const at::Tensor all = torch::randn({12 * group.size(), 32}, at::kDouble);
  const at::Tensor x = all.chunk(group.size())[static_cast<size_t>(group.rank())];

  parallel::FullyShardedDataParallel model(net, group);
  torch::optim::AdamW optimizer(model.parameters(), 1e-3);  // Of this rank's shards.
  torch::optim::AdamW optimizer_alone(alone->parameters(), 1e-3);
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(model(x), x.mean(1, /*keepdim=*/true)).backward();
    parallel::clip_grad_norm_(model, 1.0);
    optimizer.step();

    optimizer_alone.zero_grad();
    torch::mse_loss(alone(all), all.mean(1, /*keepdim=*/true)).backward();
    torch::nn::utils::clip_grad_norm_(alone->parameters(), 1.0);
    optimizer_alone.step();
  }

  int64_t num_mine = 0, num_elements = 0;
  for (const at::Tensor& shard : model.parameters()) num_mine += shard.numel();
  bool equal = true;
  {
    const auto whole = model.unsharded();  // The module's own parameters, as long as this lives.
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      num_elements += net->parameters()[i].numel();
      equal = equal && torch::allclose(net->parameters()[i], alone->parameters()[i]);
    }
  }
  if (group.rank() == 0) {
    std::printf("rank 0 holds %ld of %ld elements\n", num_mine, num_elements);
    std::printf("every parameter equals one process's: %s\n", equal ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("fsdp", train);
}
