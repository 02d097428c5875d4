// SPDX-License-Identifier: Apache-2.0
// Parameter servers: rows of a table by 64-bit id beside a network, trained by two trainers, each of
// which sends what it used. Ids get a row when they are first learnt.
//
//   $ cohort run --servers 2 --trainers 2 -- ./servers
//   trainers 2, servers 2: 64 of 64 ids are known
//   an id without a row looks like zeros: yes
//   $ cohort run --servers 1 -- ./servers
//   trainers 1, servers 1: 64 of 64 ids are known
//   an id without a row looks like zeros: yes
#include <torch/torch.h>

#include <cohort/base/error.h>
#include <cohort/base/program.h>
#include <cohort/ps/module/session.h>

namespace ps = cohort::ps;

constexpr int64_t kIds = 64;

// Ids may be any 64-bit numbers: these are far apart.
at::Tensor ids_of(const at::Tensor& numbers) {
  return numbers * 1'000'000'007;
}

int train() {
  const auto options =
      ps::with_environment({.training = ps::Training::kSync,
                            .dense_rule = {.rule = ps::Rule::kAdam, .learning_rate = 0.02f}});
  if (kIds % options.trainers != 0)
    throw cohort::ConfigError("expected a number of trainers that divides " + std::to_string(kIds) +
                              " ids, got " + std::to_string(options.trainers));
  ps::Session session(options);
  ps::Embedding rows = session.embedding({.name = "ids",
                                          .width = 8,
                                          .rule = {.rule = ps::Rule::kAdam, .learning_rate = 0.05f},
                                          .initializer = {.scale = 0.1f}});
  torch::nn::Linear net(8, 1);
  session.add("net", *net);
  session.start();
  // What is to be learnt of each id is whether its number is odd.
  const at::Tensor numbers = torch::arange(kIds, at::kLong);
  const at::Tensor mine = numbers.chunk(options.trainers)[static_cast<size_t>(options.trainer)];
  const at::Tensor label = (mine % 2).to(at::kFloat);
  for (int64_t step = session.steps_before(); step < 100; ++step) {
    rows->prefetch(ids_of(mine));
    session.pull();
    const at::Tensor score = net(rows(ids_of(mine))).squeeze(1);
    torch::binary_cross_entropy_with_logits(score, label).backward();
    session.push();
  }
  session.pull();  // After all trainers' last step.
  rows->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor score = net(rows(ids_of(numbers))).squeeze(1);
  const at::Tensor known = (score > 0) == (numbers % 2 == 1);
  const at::Tensor absent = rows(ids_of(numbers + kIds));
  if (options.trainer == 0) {
    std::printf("trainers %d, servers %zu: %ld of %ld ids are known\n", options.trainers,
                options.servers.size(), known.sum().item<int64_t>(), known.numel());
    std::printf("an id without a row looks like zeros: %s\n",
                absent.eq(0).all().item<bool>() ? "yes" : "no");
  }
  session.finish();
  return 0;
}

int main() {
  return cohort::run_program("servers", train);
}
