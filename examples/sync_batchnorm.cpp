// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks, which may differ in size.
//
//   $ cohort run --nproc-per-node 2 -- ./sync_batchnorm
//   ranks with 24 and 8 rows: running mean equals one process's on all 32: yes
//   every parameter does: yes
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/parallel/distributed_data_parallel.h>
#include <cohort/parallel/sync_batch_norm.h>

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::Linear(8, 1));
  net->to(at::kDouble);
  return net;
}

int train() {
  auto group = cohort::init_process_group();
  if (group.size() != 2)
    throw cohort::ConfigError("expected 2 ranks, got " + std::to_string(group.size()));
  auto net = make_net(), alone = make_net();
  const at::Tensor all = torch::randn({32, 4}, at::kDouble);
  const at::Tensor x = all.split_with_sizes({24, 8})[static_cast<size_t>(group.rank())];

  cohort::parallel::convert_sync_batchnorm(*net, group);  // Before the wrapper; in place.
  cohort::parallel::DistributedDataParallel ddp(net, group);
  torch::optim::SGD sgd(ddp.parameters(), 0.1);
  torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
  for (int step = 0; step < 10; ++step) {
    sgd.zero_grad();
    // DDP takes the mean over ranks: weighed so, it is the mean over all rows.
    const double weight = static_cast<double>(group.size()) / static_cast<double>(all.size(0));
    ((ddp(x) - x.sum(1, /*keepdim=*/true)).pow(2).sum() * weight).backward();
    sgd.step();

    sgd_alone.zero_grad();
    torch::mse_loss(alone->forward(all), all.sum(1, /*keepdim=*/true)).backward();
    sgd_alone.step();
  }

  bool equal = true;
  for (size_t i = 0; i < net->parameters().size(); ++i)
    equal = equal && torch::allclose(net->parameters()[i], alone->parameters()[i]);
  const bool same_mean = torch::allclose(net->named_buffers()["1.running_mean"],
                                         alone->named_buffers()["1.running_mean"]);
  if (group.rank() == 0) {
    std::printf("ranks with 24 and 8 rows: running mean equals one process's on all 32: %s\n",
                same_mean ? "yes" : "no");
    std::printf("every parameter does: %s\n", equal ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("sync_batchnorm", train);
}
