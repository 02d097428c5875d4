// SPDX-License-Identifier: Apache-2.0
// Which parameters of a model each of its units has, and which of those can lie in one buffer.
// Local; for the sharding engine alone.
#pragma once
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/parallel/model_state.h"

namespace cohort::parallel {

/// A block, and what of its parameters is in no block within it.
struct UnitParameters {
  const torch::nn::Module* module = nullptr;
  std::string name;  ///< Within the model; empty: the whole model.
  /// By what can lie in one; 25 MiB at most, or one larger parameter. By a forward_order, one that
  /// has 1 MiB ends where parameters of other units lie between, whose gradients come between its own.
  std::vector<std::vector<NamedTensor>> buckets;
};

/// The parameters of `model` in registration order, each shared one once under its first name.
std::vector<NamedTensor> all_parameters(const torch::nn::Module& model);

/// Names of all parameters and buffers that `names` mean: each of these is one's own, or that of a
/// module, which means all in it. A shared tensor is meant under every name it has.
/// Errors: c10::ValueError if the model has none of a name.
std::vector<std::string> resolve_names(const torch::nn::Module& model,
                                       const std::vector<std::string>& names);

/// Gives each parameter but those named in `ignored` (full names) to the innermost unit around it;
/// one that lies in two side by side, to the whole model. The whole model comes first, then the
/// units: what the model declares (unit.h), in its order, and the other `modules` in theirs.
/// `forward_order`: ShardingOptions'.
/// Errors: c10::ValueError if a module is not below the model, or naming the parameter that
///         forward_order lacks, repeats or does not know.
std::vector<UnitParameters> divide_into_units(const torch::nn::Module& model,
                                              const std::vector<torch::nn::Module*>& modules,
                                              const std::vector<std::string>& ignored,
                                              const std::vector<std::string>& forward_order = {});

}  // namespace cohort::parallel
