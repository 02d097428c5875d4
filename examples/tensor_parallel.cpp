// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism on a mesh: two ranks compute each layer together, and two such pairs train on
// different rows.
//
//   $ cohort run --nproc-per-node 4 -- ./tensor_parallel
//   mesh dp 2 x tp 2: rank 0 holds 536 of 1064 elements
//   every part equals one process's: yes
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/base/tensor_part.h>
#include <cohort/parallel/distributed_data_parallel.h>
#include <cohort/parallel/tensor_parallel.h>

namespace parallel = cohort::parallel;

constexpr int64_t kRows = 16;

// This rank's part of a tensor that is cut along `dim`.
at::Tensor part_of(const at::Tensor& whole, int64_t dim, const cohort::ProcessGroup& tp) {
  const auto [begin, end] = cohort::cut_of(whole.size(dim), tp.rank(), tp.size());
  return whole.narrow(dim, begin, end - begin).clone();
}

struct MlpImpl : torch::nn::Module {
  MlpImpl(const at::Tensor& first_whole, const at::Tensor& second_whole, cohort::ProcessGroup ranks)
      : tp(std::move(ranks)) {
    first = register_parameter("first", part_of(first_whole, 0, tp));     // Its outputs are cut,
    second = register_parameter("second", part_of(second_whole, 1, tp));  // and here the inputs.
    bias = register_parameter("bias", torch::zeros({8}, at::kDouble));    // Every rank has it all.
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor hidden = torch::tanh(parallel::column_parallel_linear(x, first, {}, tp));
    return parallel::row_parallel_linear(hidden, second, bias, tp);
  }
  cohort::ProcessGroup tp;
  at::Tensor first, second, bias;
};
TORCH_MODULE(Mlp);

int train() {
  auto world = cohort::init_process_group();
  const auto mesh = cohort::init_device_mesh(world, {{"dp", -1}, {"tp", 2}});
  const auto tp = mesh.group("tp");
  if (kRows % mesh.size("dp") != 0)
    throw cohort::ConfigError("expected a number of pairs of ranks that divides " +
                              std::to_string(kRows) + " rows, got " +
                              std::to_string(mesh.size("dp")));
  torch::manual_seed(1);  // All ranks draw the same whole matrices and examples.
  at::Tensor first = torch::randn({66, 8}, at::kDouble) / 8;
  at::Tensor second = torch::randn({8, 66}, at::kDouble) / 8;
  at::Tensor bias = torch::zeros({8}, at::kDouble);
  const at::Tensor all = torch::randn({kRows, 8}, at::kDouble);
  const at::Tensor x = all.chunk(mesh.size("dp"))[static_cast<size_t>(mesh.coordinate("dp"))];

  Mlp mlp(first, second, tp);
  parallel::DistributedDataParallel model(mlp, mesh,
                                          {.tensor_parallel = parallel::TensorParallelPlan{
                                               {"first", {.dim = 0}}, {"second", {.dim = 1}}}});
  torch::optim::SGD sgd(model.parameters(), 0.1);
  torch::optim::SGD sgd_alone(
      {first.requires_grad_(), second.requires_grad_(), bias.requires_grad_()}, 0.1);
  for (int step = 0; step < 10; ++step) {
    sgd.zero_grad();
    torch::mse_loss(model(x), x).backward();
    sgd.step();

    sgd_alone.zero_grad();
    const at::Tensor hidden = torch::tanh(torch::linear(all, first));
    torch::mse_loss(torch::linear(hidden, second, bias), all).backward();
    sgd_alone.step();
  }

  const bool equal = torch::allclose(mlp->first, part_of(first, 0, tp)) &&
                     torch::allclose(mlp->second, part_of(second, 1, tp)) &&
                     torch::allclose(mlp->bias, bias);
  const int64_t num_equal = world.all_reduce_sum(equal ? 1 : 0);
  if (world.rank() == 0) {
    std::printf("mesh %s: rank 0 holds %ld of %ld elements\n", mesh.describe().c_str(),
                mlp->first.numel() + mlp->second.numel() + mlp->bias.numel(),
                first.numel() + second.numel() + bias.numel());
    std::printf("every part equals one process's: %s\n", num_equal == world.size() ? "yes" : "no");
  }
  world.close();
  return 0;
}

int main() {
  return cohort::run_program("tensor_parallel", train);
}
