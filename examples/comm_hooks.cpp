// SPDX-License-Identifier: Apache-2.0
// Communication hooks of DistributedDataParallel: what travels between ranks instead of gradients.
//
//   $ cohort run --nproc-per-node 2 -- ./comm_hooks
//   no hook:         loss 0.0
//   bf16_compress:   loss 0.0
//   power_sgd:       loss 0.0, sent 1 of 16 elements
//   one's own:       loss 0.0
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/comm_hooks/compress.h>
#include <cohort/parallel/comm_hooks/power_sgd.h>
#include <cohort/parallel/distributed_data_parallel.h>

namespace parallel = cohort::parallel;

// A hook of one's own: the mean of gradients that each rank has clamped. The hook divides.
parallel::TensorFuture clamp_and_average(const cohort::ProcessGroup& group,
                                         const parallel::Bucket& bucket) {
  return parallel::start_all_reduce(group, bucket.buffer.clamp_(-1, 1).div_(group.size()));
}

double train_with(const parallel::CommHook& hook, const cohort::ProcessGroup& group) {
  torch::manual_seed(1);
  torch::nn::Linear model(torch::nn::LinearOptions(64, 64).bias(false));
  const at::Tensor target = torch::randn({64, 1}).matmul(torch::randn({1, 64}));
  const at::Tensor x = torch::randn({2, 64, 64})[group.rank() % 2];
  parallel::DistributedDataParallel ddp(model, group);
  if (hook) ddp.register_comm_hook(hook);
  torch::optim::Adam adam(ddp.parameters(), 0.05);
  for (int step = 0; step < 300; ++step) {
    adam.zero_grad();
    torch::mse_loss(ddp(x), x.matmul(target)).backward();
    adam.step();
  }
  return torch::mse_loss(model->weight, target.t()).item<double>();
}

int train() {
  auto group = cohort::init_process_group();
  const double plain = train_with({}, group);
  const double bf16 = train_with(parallel::bf16_compress_hook(), group);
  const auto state = std::make_shared<parallel::PowerSgdState>(
      parallel::PowerSgdOptions{.matrix_approximation_rank = 2, .start_power_sgd_iter = 2});
  const double power = train_with(parallel::power_sgd_hook(state), group);
  const double own = train_with(clamp_and_average, group);
  if (group.rank() == 0) {
    std::printf("no hook:         loss %.1f\n", plain);
    std::printf("bf16_compress:   loss %.1f\n", bf16);
    std::printf("power_sgd:       loss %.1f, sent 1 of %ld elements\n", power,
                state->num_elements_before() / state->num_elements_after());
    std::printf("one's own:       loss %.1f\n", own);
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("comm_hooks", train);
}
