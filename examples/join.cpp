// SPDX-License-Identifier: Apache-2.0
// Ranks with unequal numbers of batches: a rank that has run out takes part in the others' steps.
//
//   $ cohort run --nproc-per-node 2 -- ./join
//   ranks took 40 41 batches and learnt y = 3.00 x + 1.00
//   their models are equal: yes
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/join.h>

int train() {
  auto group = cohort::init_process_group();
  const int num_batches = 40 + group.rank();
  const at::Tensor x = torch::linspace(-1, 1, 1000).unsqueeze(1);
  const at::Tensor y = 3 * x + 1;
  torch::nn::Linear model(1, 1);
  cohort::parallel::DistributedDataParallel ddp(model, group);
  torch::optim::SGD sgd(ddp.parameters(), 0.5);
  cohort::parallel::join(ddp, [&] {
    for (int batch = 0; batch < num_batches; ++batch) {
      sgd.zero_grad();
      torch::mse_loss(ddp(x), y).backward();
      sgd.step();
    }
  });
  const auto taken = group.all_gather_object(std::to_string(num_batches));
  const auto weights = group.all_gather(model->weight.detach());
  if (group.rank() == 0) {
    std::printf("ranks took %s batches and learnt y = %.2f x + %.2f\n",
                c10::Join(" ", taken).c_str(), model->weight.item<double>(),
                model->bias.item<double>());
    std::printf("their models are equal: %s\n",
                torch::equal(weights.front(), weights.back()) ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("join", train);
}
