// SPDX-License-Identifier: Apache-2.0
// Forward and backward in 16 bits, parameters and optimizer in float32. float16 needs a scaled loss.
//
//   $ cohort run --nproc-per-node 2 -- ./mixed_precision
//   bfloat16: output BFloat16, parameters Float, y = 3.0 x + 1.0
//   float16:  output Half, parameters Float, y = 3.0 x + 1.0
//   steps that overflowed, and were left out by all ranks: some
#include <torch/torch.h>

#include <cohort/base/program.h>
#include <cohort/parallel/distributed_data_parallel.h>
#include <cohort/parallel/grad_scaler.h>

namespace parallel = cohort::parallel;

// Returns how many steps were left out.
int train_in(at::ScalarType type, const std::string& name, const cohort::ProcessGroup& group) {
  const at::Tensor x = torch::linspace(-1, 1, 1000).unsqueeze(1) * (1 + group.rank());
  const at::Tensor y = 3 * x + 1;
  torch::nn::Linear model(1, 1);
  parallel::DistributedDataParallel ddp(model, group, {.mixed_precision = {.param_dtype = type}});
  torch::optim::SGD sgd(ddp.parameters(), 0.2);
  // bfloat16 has float32's range: a scale of 1 that never grows, or no scaler at all.
  const bool scaled = type == at::kHalf;
  parallel::GradScaler scaler(
      group, {.init_scale = scaled ? 16777216. : 1., .growth_interval = scaled ? 2000 : 1'000'000});
  int num_left_out = 0;
  at::Tensor output;
  for (int step = 0; step < 100; ++step) {
    sgd.zero_grad();
    output = ddp(x);
    scaler.scale(torch::mse_loss(output.to(at::kFloat), y)).backward();
    if (scaler.unscale(ddp.parameters())) {
      sgd.step();
    } else {
      ++num_left_out;
    }
    scaler.update();
  }
  if (group.rank() == 0) {
    std::printf("%-9s output %s, parameters %s, y = %.1f x + %.1f\n", (name + ":").c_str(),
                c10::toString(output.scalar_type()), c10::toString(model->weight.scalar_type()),
                model->weight.item<double>(), model->bias.item<double>());
  }
  return num_left_out;
}

int train() {
  auto group = cohort::init_process_group();
  train_in(at::kBFloat16, "bfloat16", group);
  const int num_left_out = train_in(at::kHalf, "float16", group);
  if (group.rank() == 0) {
    std::printf("steps that overflowed, and were left out by all ranks: %s\n",
                num_left_out > 0 ? "some" : "none");
  }
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("mixed_precision", train);
}
