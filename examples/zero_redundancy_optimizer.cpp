// SPDX-License-Identifier: Apache-2.0
// ZeRO-1 beside DistributedDataParallel: each rank's optimizer updates its shard of the parameters,
// and holds the state of that shard alone.
//
//   $ cohort run --nproc-per-node 2 -- ./zero_redundancy_optimizer
//   rank 0 updates 592 of 1153 elements
//   the model is that of AdamW on every rank, bit by bit: yes
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/distributed_data_parallel.h>
#include <cohort/parallel/zero_redundancy_optimizer.h>

namespace parallel = cohort::parallel;
using Shards = std::vector<parallel::LocalShard>;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 1));
}

template <class Ddp, class Optimizer>
void train_with(Ddp& ddp, Optimizer& optimizer, const cohort::ProcessGroup& group) {
  const at::Tensor x = torch::linspace(-1, 1, 512).view({32, 16}) + group.rank();
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(ddp(x), x.mean(1, /*keepdim=*/true)).backward();
    optimizer.step();
  }
}

int train() {
  auto group = cohort::init_process_group();
  auto net = make_net();
  parallel::DistributedDataParallel ddp(net, group);
  parallel::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      ddp.named_parameters(), group, [](const Shards& shards) {
        std::vector<at::Tensor> mine;
        for (const auto& shard : shards) mine.push_back(shard.tensor);
        return torch::optim::AdamW(mine, 1e-2);
      });
  train_with(ddp, optimizer, group);

  auto other_net = make_net();
  parallel::DistributedDataParallel other_ddp(other_net, group);
  torch::optim::AdamW adamw(other_ddp.parameters(), 1e-2);
  train_with(other_ddp, adamw, group);

  int64_t num_mine = 0, num_elements = 0;
  for (const auto& shard : optimizer.local_shards()) num_mine += shard.tensor.numel();
  bool equal = true;
  for (size_t i = 0; i < ddp.parameters().size(); ++i) {
    num_elements += ddp.parameters()[i].numel();
    equal = equal && torch::equal(ddp.parameters()[i], other_ddp.parameters()[i]);
  }
  if (group.rank() == 0) {
    std::printf("rank 0 updates %ld of %ld elements\n", num_mine, num_elements);
    std::printf("the model is that of AdamW on every rank, bit by bit: %s\n", equal ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("zero_redundancy_optimizer", train);
}
