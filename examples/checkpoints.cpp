// SPDX-License-Identifier: Apache-2.0
// Save, save in the background, and load on another number of ranks: the first run stops at step
// 20, the others continue what it began.
//
//   $ cohort run --nproc-per-node 2 -- ./checkpoints
//   world size 2: steps 0 to 20
//   $ cohort run --nproc-per-node 3 -- ./checkpoints
//   world size 3: steps 20 to 40
//   the model is that of one process without a stop: yes
//   $ ./checkpoints
//   world size 1: steps 40 to 60
//   the model is that of one process without a stop: yes
#include <filesystem>
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/parallel/sharding/fully_sharded_data_parallel.h>
#include <cohort/train/model_checkpoint.h>

namespace parallel = cohort::parallel;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  net->to(at::kDouble);
  return net;
}

constexpr int64_t kRows = 12;

// What a step trains on, on all ranks together: a function of its number.
at::Tensor batch_of(int64_t step) {
  return torch::arange(6 * kRows, at::kDouble).add(static_cast<double>(step)).sin().view({-1, 6});
}

template <class Model>
void train_step(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  torch::mse_loss(model(x), x.mean(1, /*keepdim=*/true)).backward();
  optimizer.step();
}

int train() {
  const std::string folder = "checkpoints.saved";  // All ranks see it.
  auto group = cohort::init_process_group();
  if (kRows % group.size() != 0)
    throw cohort::ConfigError("expected a number of ranks that divides " + std::to_string(kRows) +
                              " rows, got " + std::to_string(group.size()));
  auto net = make_net();
  parallel::FullyShardedDataParallel model(net, group);
  torch::optim::AdamW optimizer(model.parameters(), 1e-2);
  int64_t begin = 0;
  if (std::filesystem::exists(folder + "/manifest.json")) {
    cohort::checkpoint::load(model, optimizer, folder);
    begin = cohort::train::read_update(folder);
  }
  for (int64_t step = begin; step < begin + 10; ++step)
    train_step(model, optimizer, batch_of(step).chunk(group.size())[group.rank()]);
  auto saving = cohort::checkpoint::async_save(model, optimizer, folder, {.step = begin + 10});
  for (int64_t step = begin + 10; step < begin + 20; ++step)
    train_step(model, optimizer, batch_of(step).chunk(group.size())[group.rank()]);
  saving.wait();  // Now the state after ten steps is the folder's checkpoint,
  cohort::checkpoint::save(model, optimizer, folder, {.step = begin + 20});  // and now this one.

  if (group.rank() == 0)
    std::printf("world size %d: steps %ld to %ld\n", group.size(), begin, begin + 20);
  if (begin > 0) {
    auto alone = make_net();
    auto forward = [&](const at::Tensor& x) { return alone->forward(x); };
    torch::optim::AdamW optimizer_alone(alone->parameters(), 1e-2);
    for (int64_t step = 0; step < begin + 20; ++step)
      train_step(forward, optimizer_alone, batch_of(step));
    bool equal = true;
    const auto whole = model.unsharded();
    for (size_t i = 0; i < net->parameters().size(); ++i)
      equal = equal && torch::allclose(net->parameters()[i], alone->parameters()[i]);
    if (group.rank() == 0)
      std::printf("the model is that of one process without a stop: %s\n", equal ? "yes" : "no");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("checkpoints", train);
}
