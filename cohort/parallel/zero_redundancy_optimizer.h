// SPDX-License-Identifier: Apache-2.0
// ZeRO-1 beside plain DistributedDataParallel: the optimizer's work and state are sharded.
#pragma once
#include <ATen/core/Tensor.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/sharding/sharding_engine.h"

namespace cohort::parallel {

/// What ZeroRedundancyOptimizer does around an optimizer's step. Not a template.
class OptimizerShards {
 public:
  OptimizerShards(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                  const comm::ProcessGroup& group, CallSite site = CallSite::here());
  ~OptimizerShards();

  const std::vector<LocalShard>& local_shards() const;
  /// Makes the local shards' gradients views of the parameters'. Local.
  void take_gradients();
  /// All-gathers the updated shards into the parameters. Collective; blocks.
  void all_gather_updates();
  void zero_grad();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes every rank update its shard, one W-th, of the parameters with an optimizer of its own, and
/// all-gathers the updated shards.
///
/// The parameters move into one flat buffer for each type and device, of which the ranks hold equal
/// shards: of P blocks of 16 elements no rank updates more than P / W, rounded up, however large
/// single parameters are. `make` gets this rank's shards, flat leaves with the names of their
/// parameters, and returns any optimizer of them, with parameter groups by name if it likes:
///
///   parallel::DistributedDataParallel<Model> ddp(model, group);
///   parallel::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
///       optim::named_parameters(*model), group, [](const auto& shards) { ... });
///   loss(ddp(batch)).backward();  optimizer.step();  optimizer.zero_grad();
///
/// Gradients stay whole on every rank: clip them as in one process, or by the optimizer's own
/// factor (optim::Adam::step). A parameter without a gradient keeps its value and state.
///
/// An optimizer that needs more of a parameter than its elements (a norm by tensor, a shape, as
/// LAMB, Adafactor) would take the local shard for it and compute something else.
///
/// Collective: constructor and step.
/// Threads:    one.
/// Memory:     4 + 4 + 8/W bytes a parameter in float32 under Adam.
/// Cost:       step sends (W-1)/W of the parameters' bytes.
/// Numerics:   the same arithmetic by element, bit for bit. libtorch's fused Adam computes the last
///             size % 8 (AVX2) or 16 (AVX-512) elements of a tensor in double precision; cuts lie
///             at multiples of 16 elements, so that those are the same ones.
/// Errors:     c10::ValueError if ranks' parameters differ, a name comes twice, none requires a
///             gradient, one is not contiguous, dense and floating-point, or a gradient is sparse;
///             PeerError when a rank is lost.
/// Source:     Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
template <class Optimizer>
class ZeroRedundancyOptimizer {
 public:
  /// Those of `parameters` that require a gradient; their values must be the same on all ranks, as
  /// DistributedDataParallel makes them. `make`: const std::vector<LocalShard>& -> Optimizer.
  template <class Make>
  ZeroRedundancyOptimizer(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                          const comm::ProcessGroup& group, Make&& make,
                          CallSite site = CallSite::here())
      : shards_(parameters, group, site),
        optimizer_(std::forward<Make>(make)(shards_.local_shards())) {}

  /// As optimizer().step(arguments...); then every rank has the updated parameters.
  template <class... Arguments>
  void step(Arguments&&... arguments) {
    shards_.take_gradients();
    optimizer_.step(std::forward<Arguments>(arguments)...);
    shards_.all_gather_updates();
  }

  /// Forgets the gradients: they become undefined.
  void zero_grad() { shards_.zero_grad(); }

  Optimizer& optimizer() { return optimizer_; }
  /// What this rank's state is of: checkpoints are made from it.
  const std::vector<LocalShard>& local_shards() const { return shards_.local_shards(); }

 private:
  OptimizerShards shards_;
  Optimizer optimizer_;
};

}  // namespace cohort::parallel
