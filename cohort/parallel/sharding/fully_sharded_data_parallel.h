// SPDX-License-Identifier: Apache-2.0
// Data parallelism that shards what every rank would hold a copy of: optimizer state, gradients,
// parameters.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "cohort/parallel/mesh.h"
#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/parallel/sharding/unit.h"
#include "cohort/parallel/tensor_parallel_layout.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Wraps a module holder. Each of the W ranks keeps one W-th of what `options.shard` selects.
///
/// Parameters lie in flat buffers, one for each unit: the modules below the model that are
/// declared as Unit<Block> (unit.h), and what is in none of them. Each rank holds an equal shard of
/// each buffer. `parameters()` are this rank's shards of what is trained: make any optimizer from
/// them that works element by element.
///
///   parallel::FullyShardedDataParallel sharded(net, group,
///       {.shard = parallel::Shard::kGradients});
///   torch::optim::AdamW optimizer(sharded.parameters(), 3e-4);
///   loss_of(sharded(batch)).backward();  optimizer.step();  optimizer.zero_grad();
///
/// The module's own parameters are there in the wrapper's forward and its backward, and while
/// unsharded() lives. A read elsewhere is a c10::Error with the parameter's name, under every
/// Shard: after an optimizer's step each rank has the new values of its own shards only. A movable
/// handle: see ModelWrapper for unsharded(), no_sync() and more. docs/sharding.md shows each option
/// at work.
///
/// Collective: constructor, every forward, backward, gradient_norm, unsharded. Every rank runs the
///             same units in the same order.
/// Numerics: gradients are divided by the number of ranks, travel in the parameters' own type (or
///           in mixed_precision.reduce_dtype), and are summed in the order of ranks; on a
///           mesh of two data axes, the sums along "dp_replicate" after that. What is no parameter of the model
///           (an input, a temperature beside it) keeps this rank's own gradient, and hooks of
///           parameters see this rank's.
/// Threads:  one.
/// Errors:   c10::ValueError if the ranks' models differ or options contradict, for a parameter
///           that is not contiguous, or, in backward, for a sparse gradient; PeerError when a
///           rank is lost, or when one leaves out a unit, or a parameter of one, that others use,
///           with its name.
/// Source:   Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
template <ModuleHolder Holder>
class FullyShardedDataParallel : public ModelHandle<Holder> {
 public:
  /// `module`: a TORCH_MODULE holder or a shared_ptr. Broadcasts rank 0's state, then keeps this
  /// rank's shards. `units`: modules below `module` that run by run_unit, beside those that are
  /// Unit<Block>; not owned.
  FullyShardedDataParallel(Holder module, const comm::ProcessGroup& group,
                           const ShardingOptions& options = {},
                           const std::vector<torch::nn::Module*>& units = {},
                           CallSite site = CallSite::here())
      : FullyShardedDataParallel(CallSiteScope(site), model_ranks(group, options.tensor_parallel),
                                 module, {.shard = group, .replicate = {}}, options, units) {}
  /// The same along the data axis of a mesh, "dp", or along two: the ranks along "dp_shard" share
  /// the model out, those along "dp_replicate" hold the same shards (hybrid sharding, HSDP).
  /// Along an axis "tp", of this mesh or of that which it is a part of, ranks hold parts of the
  /// model: options.tensor_parallel says which.
  FullyShardedDataParallel(Holder module, const DeviceMesh& mesh,
                           const ShardingOptions& options = {},
                           const std::vector<torch::nn::Module*>& units = {},
                           CallSite site = CallSite::here())
      : FullyShardedDataParallel(
            CallSiteScope(site),
            model_ranks(*shared_module(module), mesh, options.tensor_parallel, site), module,
            sharding_groups(mesh), options, units) {}

  /// Runs the module's forward. It may return any value that tensor_tree.h can look into.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    ShardingEngine& sharding = engine();
    Holder& model = this->module();
    this->check_first_inputs(arguments...);
    const ShardingEngine::Forward forward(sharding);
    const auto cast = [&](const at::Tensor& tensor) { return sharding.cast_input(tensor); };
    return sharding.run(*model, [&] {
      auto output = model->forward(with_tensors(std::forward<Arguments>(arguments), cast)...);
      for_each_tensor(output, [&](at::Tensor& tensor) { tensor = sharding.cast_output(tensor); });
      return output;
    });
  }

  /// All that this rank holds, frozen parameters, too: what checkpoints are made from.
  const std::vector<LocalShard>& local_shards() const { return engine().local_shards(); }

  ShardingEngine& engine() const { return static_cast<ShardingEngine&>(ModelWrapper::engine()); }

 private:
  FullyShardedDataParallel(const CallSiteScope&, ModelRanks ranks, Holder& module,
                           const ShardingGroups& groups, const ShardingOptions& options,
                           const std::vector<torch::nn::Module*>& units)
      : ModelHandle<Holder>(
            module, std::make_shared<ShardingEngine>(shared_module(module), groups, options, units),
            std::move(ranks)) {}
};

}  // namespace cohort::parallel
