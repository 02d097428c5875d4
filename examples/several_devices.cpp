// SPDX-License-Identifier: Apache-2.0
// One process that drives several devices: a replica of the module and a thread for each. Take
// DistributedDataParallel (data_parallel.cpp) where the program may be several processes.
//
//   $ ./several_devices
//   2 devices learnt y = 3.00 x + 1.00
//   their output equals one device's: yes
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/data_parallel.h>

int train() {
  const at::Tensor x = torch::linspace(-1, 1, 1000).unsqueeze(1);
  const at::Tensor y = 3 * x + 1;
  torch::nn::Linear model(1, 1);
  const std::vector<c10::Device> devices{at::kCPU, at::kCPU};  // A device may be listed twice.
  cohort::parallel::DataParallel parallel(model, devices);
  torch::optim::SGD sgd(model->parameters(), 0.5);
  for (int step = 0; step < 40; ++step) {
    sgd.zero_grad();
    torch::mse_loss(parallel(x), y).backward();
    sgd.step();
  }
  std::printf("%zu devices learnt y = %.2f x + %.2f\n", devices.size(),
              model->weight.item<double>(), model->bias.item<double>());
  std::printf("their output equals one device's: %s\n",
              torch::allclose(parallel(x), model(x)) ? "yes" : "no");
  return 0;
}

int main() {
  return cohort::run_program("several_devices", train);
}
