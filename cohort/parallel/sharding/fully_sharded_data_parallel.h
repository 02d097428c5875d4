// Data parallelism that shards what every rank would hold a copy of: optimizer state, gradients,
// parameters.
#pragma once
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/parallel/mesh.h"
#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Wraps a module holder. Each of the W ranks keeps one W-th of what `options.shard` selects.
///
/// Parameters lie in flat buffers, one for each FSDP unit: the blocks given to the constructor, and
/// the rest of the model. Each rank holds an equal shard of each buffer. `local_shards` are this
/// rank's: make any optimizer from them, it needs to know nothing of ranks.
///
///   parallel::FullyShardedDataParallel<Model> sharded(model, group, {}, blocks);
///   optim::Adam adam(sharded.named_local_shards());
///   loss(sharded(batch)).backward();  adam.step(rate);  adam.zero_grad();
///
/// A block is called through parallel::unit in the model's forward, so that its parameters can be
/// gathered before and freed after; one that is called plainly must not be given as a unit. The
/// module's own parameters are there in the wrapper's forward and its backward, and between unshard
/// and reshard. Reading one elsewhere is a c10::Error with its name, under every Shard: after an
/// optimizer's step each rank has the new values of its own shards only. docs/sharding.md shows
/// each option at work.
///
/// Collective: constructor, every forward, backward, gradient_norm, unshard. Every rank runs the
///             same units in the same order.
/// Numerics: gradients are divided by the number of ranks, travel in the parameters' own type (or
///           in mixed_precision.reduce_dtype), and are summed in the order of ranks; with
///           replicate_group, the sums of its ranks after that. What is no parameter of the model
///           (an input, a temperature beside it) keeps this rank's own gradient, and hooks of
///           parameters see this rank's.
/// Threads:  one.
/// Errors:   c10::ValueError if the ranks' models differ or options contradict; PeerError when a
///           rank is lost, or when one leaves out a unit, or a parameter of one, that others use,
///           with its name.
/// Source:   Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
template <class Holder>
class FullyShardedDataParallel {
 public:
  /// Broadcasts rank 0's state, then keeps this rank's shards. `units`
  /// are modules below `module`, as nested as they come; not owned.
  FullyShardedDataParallel(Holder module, const comm::ProcessGroup& group,
                           const ShardingOptions& options = {},
                           const std::vector<torch::nn::Module*>& units = {})
      : module_(std::move(module)), engine_(*module_, group, options, units) {}
  /// The same on a mesh of one axis, or of two: the ranks along the second share the model out,
  /// those along the first hold the same shards (hybrid sharding, HSDP; replicate_group is set).
  FullyShardedDataParallel(Holder module, const DeviceMesh& mesh,
                           const ShardingOptions& options = {},
                           const std::vector<torch::nn::Module*>& units = {})
      : module_(std::move(module)),
        engine_(*module_, sharding_groups(mesh).shard, on_mesh(options, mesh), units) {}

  /// Runs the module's forward. It may return any value that tensor_tree.h can look into.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const ShardingEngine::Forward forward(engine_);
    const auto cast = [&](const at::Tensor& tensor) { return engine_.cast_input(tensor); };
    return engine_.run(*module_, [&] {
      auto output = module_->forward(with_tensors(std::forward<Arguments>(arguments), cast)...);
      for_each_tensor(output, [&](at::Tensor& tensor) { tensor = engine_.cast_output(tensor); });
      return output;
    });
  }

  /// The same as loss.backward(gradient): adds this step's gradients to those of the local shards.
  void backward(const at::Tensor& loss, const at::Tensor& gradient = {}) {
    loss.backward(gradient);
  }

  /// Accumulate locally while the returned guard lives; costs a whole gradient's memory.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(ShardingEngine& engine)
        : engine_(engine), before_(engine.set_synchronized(false)) {}
    ~NoSync() { engine_.set_synchronized(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    ShardingEngine& engine_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(engine_); }

  /// As unshard and reshard of the engine.
  void unshard() { engine_.unshard(); }
  void reshard(bool keep = false) { engine_.reshard(keep); }

  const std::vector<LocalShard>& local_shards() const { return engine_.local_shards(); }
  /// Name and tensor of every local shard that is trained: what an optimizer is made of.
  std::vector<std::pair<std::string, at::Tensor>> named_local_shards() const;

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }
  ShardingEngine& engine() { return engine_; }

 private:
  static ShardingOptions on_mesh(ShardingOptions options, const DeviceMesh& mesh) {
    options.replicate_group = sharding_groups(mesh).replicate;
    return options;
  }

  Holder module_;
  ShardingEngine engine_;
};

template <class Holder>
std::vector<std::pair<std::string, at::Tensor>>
FullyShardedDataParallel<Holder>::named_local_shards() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const LocalShard& shard : local_shards())
    if (shard.tensor.requires_grad()) named.emplace_back(shard.name, shard.tensor);
  return named;
}

/// The same as loss.backward(), of a loss that several sharded models had part in, each as often as
/// it likes. Collective over all of the models' groups.
template <class... Holders>
void backward(const at::Tensor& loss, FullyShardedDataParallel<Holders>&...) {
  loss.backward();
}

/// Calls `forward()`, the forward of `block`, inside a sharded model's forward with the block's
/// parameters there if it is one of the model's units. Outside of one, or for another module, this
/// is a plain call: a model written with it runs anywhere.
template <class Call>
auto run_unit(const torch::nn::Module& block, Call forward) {
  ShardingEngine* engine = ShardingEngine::current();
  return engine ? engine->run(block, forward) : forward();
}

/// The same of block->forward(arguments...); a unit gets the arguments in the type it computes in.
template <class Holder, class... Arguments>
auto unit(Holder& block, Arguments&&... arguments) {
  const ShardingEngine* engine = ShardingEngine::current();
  const bool casts = engine && engine->is_unit(*block);
  const auto cast = [&](const at::Tensor& tensor) {
    return casts ? engine->cast_input(tensor) : tensor;
  };
  return run_unit(*block, [&] {
    return block->forward(with_tensors(std::forward<Arguments>(arguments), cast)...);
  });
}

}  // namespace cohort::parallel
