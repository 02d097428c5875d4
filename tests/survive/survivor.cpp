// SPDX-License-Identifier: Apache-2.0
// A short training run in which one rank fails on purpose; `survive` starts it many times.
// Usage: survivor FOLDER STEPS KIND RANK STEP, KIND one of none, kill, stop, throw: what RANK does
// before STEP, in the first attempt only. Rank 0 saves every 4 steps into FOLDER/checkpoint; a
// later attempt continues from there. At the end rank 0 prints the SHA-256 of the weights.
// COHORT_TEST_STEP_MS: the pause after each step.
#include <csignal>
#include <filesystem>
#include <thread>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/base/checksum.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/train/checkpoint.h"

namespace {

using namespace cohort;

struct Fault {
  std::string kind;
  int rank;
  int64_t step;
};

void maybe_fail(const Fault& fault, int rank, int64_t step) {
  if (rank != fault.rank || step != fault.step || env_int("COHORT_RESTART_COUNT").value_or(0) > 0)
    return;
  if (fault.kind == "kill") raise(SIGKILL);
  if (fault.kind == "stop") raise(SIGSTOP);
  if (fault.kind == "throw")
    throw std::runtime_error("thrown on purpose at step " + std::to_string(step));
}

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  torch::nn::Sequential model;
  for (int layer = 0; layer < 4; ++layer) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::Tanh());
  }
  return model;
}

// What rank `rank` learns from at `step`; the same in every attempt.
at::Tensor batch_of(int64_t step, int rank) {
  torch::manual_seed(static_cast<uint64_t>(step * 100 + rank));
  return torch::randn({16, 64});
}

int survive(const std::string& folder, int64_t steps, const Fault& fault) {
  comm::ProcessGroup group(comm::rank_info_from_environment(),
                           {.timeout = std::chrono::seconds(60)});
  torch::nn::Sequential model = make_model();
  const std::string checkpoint = folder + "/checkpoint";
  int64_t step = 0;
  if (std::filesystem::exists(checkpoint + "/manifest.json")) {
    train::load_checkpoint(checkpoint, *model);
    step = std::stoll(train::read_manifest(checkpoint).at("step"));
  }
  // Small buckets: several all-reduces are on their way when the fault comes.
  parallel::DistributedDataParallel<torch::nn::Sequential> ddp(model, group,
                                                               {.bucket_cap_mb = 0.02});
  torch::optim::SGD sgd(model->parameters(), 0.1);
  const std::chrono::milliseconds pause(env_int("COHORT_TEST_STEP_MS").value_or(0));
  while (step < steps) {
    maybe_fail(fault, group.rank(), step);
    const at::Tensor x = batch_of(step, group.rank());
    sgd.zero_grad();
    (ddp(x) - x.roll(1, 1)).square().mean().backward();
    sgd.step();
    ++step;
    std::this_thread::sleep_for(pause);
    if (step % 4 == 0 && group.rank() == 0) {
      train::save_checkpoint(checkpoint, *model, step, {{"step", std::to_string(step)}});
    }
  }
  if (group.rank() == 0) {
    Sha256 sum;
    for (const auto& parameter : model->parameters()) {
      const at::Tensor values = parameter.detach().contiguous();
      sum.update({static_cast<const std::byte*>(values.data_ptr()), values.nbytes()});
    }
    std::printf("weights %s\n", sum.hex().c_str());
  }
  group.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("survivor", [&] {
    if (argc != 6) throw ConfigError("usage: survivor FOLDER STEPS none|kill|stop|throw RANK STEP");
    return survive(argv[1], std::stoll(argv[2]),
                   {argv[3], std::stoi(argv[4]), std::stoll(argv[5])});
  });
}
