// A training run on disk: cohort's checkpoint, with the optimizer's momentum beside the weights.
#pragma once
#include <cstdint>
#include <string>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

namespace imagenet {

/// Where a run stands.
struct RunState {
  std::string arch;
  int64_t epochs_done = 0;
  double best_top1 = -1;  ///< Percent; below 0: not evaluated yet.
};

/// Writes weights, momentum and state to `folder`; the manifest comes last, so that a save cut
/// short leaves the checkpoint before it. Local: for rank 0. Blocks until the disk has it. Errors:
/// ConfigError if the folder is not writable, c10::Error if writing fails.
void save_run(const std::string& folder, const torch::nn::Module& model, torch::optim::SGD& sgd,
              const RunState& state);

/// Reads the state alone. Errors: ConfigError if `folder` holds no checkpoint of this program.
RunState read_run(const std::string& folder);

/// Fills model and optimizer. Errors: ConfigError that names the file: damaged, or another model's.
void load_run(const std::string& folder, torch::nn::Module& model, torch::optim::SGD& sgd);

}  // namespace imagenet
