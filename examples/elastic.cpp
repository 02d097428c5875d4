// SPDX-License-Identifier: Apache-2.0
// A worker is killed, the launcher starts all of them again, and they resume from the last save. One
// process alone then loads what they saved at the end.
//
//   $ cohort run --nproc-per-node 2 --max-restarts 1 -- ./elastic
//   start 1: from step 0
//   start 2: from step 20
//   world size 2: learnt y = 3.00 x + 1.00
//   $ ./elastic
//   start 1: from step 40
//   world size 1: learnt y = 3.00 x + 1.00
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/distributed_data_parallel.h>
#include <cohort/train/model_checkpoint.h>

int train() {
  const std::string folder = "elastic.saved";  // All ranks see it.
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const int num_restarts = restarts == nullptr ? 0 : std::atoi(restarts);
  auto group = cohort::init_process_group();
  const at::Tensor x = torch::linspace(-1, 1, 1000).unsqueeze(1);
  const at::Tensor y = 3 * x + 1;
  torch::nn::Linear model(1, 1);
  cohort::parallel::DistributedDataParallel ddp(model, group);
  torch::optim::SGD sgd(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  int64_t step = 0;
  if (std::filesystem::exists(folder + "/manifest.json")) {
    cohort::checkpoint::load(ddp, sgd, folder);
    step = cohort::train::read_update(folder);
  }
  if (group.rank() == 0) {
    std::printf("start %d: from step %ld\n", num_restarts + 1, step);
    std::fflush(stdout);
  }
  while (step < 40) {
    sgd.zero_grad();
    torch::mse_loss(ddp(x), y).backward();
    sgd.step();
    ++step;
    if (step % 10 == 0) cohort::checkpoint::save(ddp, sgd, folder, {.step = step});
    if (step == 25 && num_restarts == 0 && group.rank() == 1) std::raise(SIGKILL);
  }
  if (group.rank() == 0) {
    std::printf("world size %d: learnt y = %.2f x + %.2f\n", group.size(),
                model->weight.item<double>(), model->bias.item<double>());
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("elastic", train);
}
