// SPDX-License-Identifier: Apache-2.0
// The state of torch::optim's optimizers, by parameter and element. For model_checkpoint.cpp.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <torch/optim/optimizer.h>
#include <vector>

#include "cohort/train/tensor_shard.h"

namespace cohort::train {

/// Returns the state of every parameter that has some: tensors with the place of their parameter,
/// and counters, on the rank with the parameter's first element, as a scalar of int64.
///
/// `parameters`: what the optimizer's tensors are. Local.
/// Errors: c10::ValueError for an optimizer whose state is not by element, or that updates a tensor
///         which is none of `parameters`.
std::vector<TensorShard> optimizer_slices(torch::optim::Optimizer& optimizer,
                                          const std::vector<TensorShard>& parameters);

/// "torch::optim::AdamW".
/// Errors: as optimizer_slices.
std::string class_of(const torch::optim::Optimizer& optimizer);

/// Throws if the `state` of a checkpoint, such as "weight.exp_avg", is of other optimizers than
/// `own`, a class_of or "cohort::optim::Adam".
/// Errors: ConfigError that names `path`, those and `own`.
void check_optimizer_class(const std::string& path, const std::vector<std::string>& state,
                           const std::string& own);

/// State that is on its way into an optimizer.
class OptimizerLoad {
 public:
  /// Makes room for what the checkpoint has; `has` tells by name, such as "weight.exp_avg". State
  /// that a step could not do without is asked for beside what there is of its parameter.
  /// Errors: as optimizer_slices.
  OptimizerLoad(torch::optim::Optimizer& optimizer, const std::vector<TensorShard>& parameters,
                const std::function<bool(const std::string&)>& has);

  /// What to fill.
  const std::vector<TensorShard>& local_shards() const { return slices_; }
  /// Gives it to the optimizer; removes what the checkpoint does not have.
  void install();

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<TensorShard> slices_;
  std::vector<std::function<void()>> installs_;
};

}  // namespace cohort::train
