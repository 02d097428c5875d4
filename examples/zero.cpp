// SPDX-License-Identifier: Apache-2.0
// DDP and ZeRO's three stages by one interface: they train alike, and differ in what a rank holds.
//
//   $ cohort run --nproc-per-node 2 -- ./zero
//   ddp:   loss 0.005, rank 0 updates 1153 of 1153 elements
//   zero1: loss 0.005, rank 0 updates 592 of 1153 elements
//   zero2: loss 0.005, rank 0 updates 592 of 1153 elements
//   zero3: loss 0.005, rank 0 updates 592 of 1153 elements
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/parallel/clip_grad.h>
#include <cohort/parallel/strategy.h>

namespace parallel = cohort::parallel;

constexpr int64_t kRows = 64;

void train_by(const std::string& strategy, const cohort::ProcessGroup& group) {
  torch::manual_seed(1);  // Every strategy begins with the same model and examples.
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  net->to(at::kDouble);
  const at::Tensor all = torch::randn({kRows, 16}, at::kDouble);
  const at::Tensor x = all.chunk(group.size())[static_cast<size_t>(group.rank())];
  const at::Tensor y = x.sin().mean(1, /*keepdim=*/true);
  int64_t num_elements = 0;
  for (const at::Tensor& parameter : net->parameters()) num_elements += parameter.numel();

  parallel::ParallelModel model(net, group, {.strategy = parallel::parse_strategy(strategy)});
  torch::optim::AdamW optimizer(model.parameters(), 1e-2);
  at::Tensor loss;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    loss = torch::mse_loss(model(x), y);
    loss.backward();
    parallel::clip_grad_norm_(model, 1.0);
    optimizer.step();
  }
  const double mean = group.all_reduce(loss.detach(), cohort::comm::ReduceOp::kAvg).item<double>();
  int64_t num_updated = 0;
  for (const at::Tensor& mine : model.parameters()) num_updated += mine.numel();
  if (group.rank() != 0) return;
  std::printf("%-6s loss %.3f, rank 0 updates %ld of %ld elements\n", (strategy + ":").c_str(),
              mean, num_updated, num_elements);
}

int train() {
  auto group = cohort::init_process_group();
  if (kRows % group.size() != 0)
    throw cohort::ConfigError("expected a number of ranks that divides " + std::to_string(kRows) +
                              " rows, got " + std::to_string(group.size()));
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) train_by(strategy, group);
  group.close();
  return 0;
}

int main() {
  return cohort::run_program("zero", train);
}
