// SPDX-License-Identifier: Apache-2.0
// The whole of data parallelism in thirty lines.
//
//   $ cohort run --nproc-per-node 2 -- ./data_parallel
//   world size 2: learnt y = 3.00 x + 1.00
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/comm/process_group.h>
#include <cohort/data/distributed_sampler.h>
#include <cohort/parallel/distributed_data_parallel.h>

int train() {
  auto group = cohort::init_process_group();
  const at::Tensor x = torch::linspace(-1, 1, 1000).unsqueeze(1);
  const at::Tensor y = 3 * x + 1;
  torch::nn::Linear model(1, 1);
  cohort::parallel::DistributedDataParallel ddp(model, group);
  torch::optim::SGD sgd(ddp.parameters(), 0.5);
  cohort::data::DistributedSampler sampler(
      {.num_examples = x.size(0), .rank = group.rank(), .world_size = group.size(), .seed = 1});
  for (int epoch = 0; epoch < 40; ++epoch) {
    sampler.set_epoch(epoch);
    const at::Tensor mine = torch::tensor(sampler.indices());
    sgd.zero_grad();
    torch::mse_loss(ddp(x.index_select(0, mine)), y.index_select(0, mine)).backward();
    sgd.step();
  }
  if (group.rank() == 0) {
    std::printf("world size %d: learnt y = %.2f x + %.2f\n", group.size(),
                model->weight.item<double>(), model->bias.item<double>());
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("data_parallel", train);
}
