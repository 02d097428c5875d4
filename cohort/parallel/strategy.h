// SPDX-License-Identifier: Apache-2.0
// One interface to the strategies of data parallelism: what of a model each rank holds.
#pragma once
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

namespace cohort::parallel {

/// What each rank holds; docs/strategies.md tells when to take which.
enum class Strategy {
  kDdp,     ///< Everything.
  kZero1,   ///< A share of the optimizer's state: Shard::kOptimizer.
  kZero2,   ///< Of gradients, too: Shard::kGradients.
  kZero3,   ///< Of parameters, too: Shard::kParameters, FSDP.
  kHybrid,  ///< As kZero3 within each host; the hosts hold the same (HSDP).
};

/// Parses "ddp", "zero1", "zero2", "zero3", "hybrid" or "fsdp", which is zero3 by its other name.
/// Errors: ConfigError for another name.
Strategy parse_strategy(const std::string& name);
std::string to_string(Strategy strategy);
/// Whether a rank holds parameters in part only.
bool shards_parameters(Strategy strategy);

struct StrategyOptions {
  Strategy strategy = Strategy::kDdp;
  DistributedDataParallelOptions ddp;  ///< Of kDdp.
  ShardingOptions sharding;            ///< Of the others, which set `shard`.
  /// What the ranks along the mesh's axis "tp" hold in parts, under every strategy; needed if there
  /// is such an axis. It replaces that of `ddp` and `sharding`.
  std::optional<TensorParallelPlan> tensor_parallel;
  /// The types to compute and communicate in, under every strategy. It replaces that of `ddp` and
  /// `sharding`; without it, the strategy reads its own.
  std::optional<MixedPrecision> mixed_precision{};
};

/// Returns `options` as the wrapper of its strategy reads them: `ddp` or `sharding` has what all
/// strategies share.
/// Errors: c10::ValueError if only the one that the strategy does not read has a mixed_precision or
///         `ignored`, and for a tensor_parallel of either instead of that of StrategyOptions.
StrategyOptions resolve(StrategyOptions options);

/// Makes the mesh of all ranks of `group` that a strategy wants: one axis, "dp"; for kHybrid two,
/// "dp_replicate" across hosts and "dp_shard" within a host. With `tensor_parallel` above 1 a last
/// axis "tp" of that size: ranks that compute one model together, on one host if each host's number
/// of ranks is a multiple of it, else neighbours by number.
/// Collective; blocks.
/// Errors: ConfigError for kHybrid on one host or on hosts with different numbers of ranks, and if
///         `tensor_parallel` does not divide the number of ranks.
DeviceMesh init_strategy_mesh(const comm::ProcessGroup& group, Strategy strategy,
                              int tensor_parallel = 1, CallSite site = CallSite::here());
/// The ranks of a strategy's mesh that write checkpoints, if this is one of them; else empty.
/// Collective over the mesh's world; blocks.
comm::ProcessGroup checkpoint_writers_of(const DeviceMesh& mesh, Strategy strategy,
                                         CallSite site = CallSite::here());

/// Every parameter as one shard that holds all of it; a shared one once, under its first name.
std::vector<LocalShard> full_shards_of(const torch::nn::Module& module);
/// The same of every parameter and buffer, under every name that it has.
std::vector<LocalShard> whole_state_of(const torch::nn::Module& module);
/// Errors: c10::ValueError where parameters have a lower precision's type now.
template <class Holder>
std::vector<LocalShard> whole_state_of(const DistributedDataParallel<Holder>& model) {
  model.engine().check_masters();
  return whole_state_of(*model.module());
}

/// Wraps a module holder in DistributedDataParallel or FullyShardedDataParallel, as the strategy
/// says.
///
///   parallel::ParallelModel model(net, group, {.strategy = parallel::parse_strategy(name)});
///   torch::optim::AdamW optimizer(model.parameters(), 3e-4);
///   loss_of(model(batch)).backward();  optimizer.step();  optimizer.zero_grad();
///
/// Collective: constructor, forward, backward, gradient_norm, unsharded: what the strategy
///             exchanges.
/// Errors, numerics, threads: as those two.
template <ModuleHolder Holder>
class ParallelModel : public ModelHandle<Holder> {
 public:
  /// `mesh` has one data axis, for kHybrid two: ranks along "dp_replicate" hold the same, ranks
  /// along "dp_shard" share the model out; and "tp", if ranks hold parts of the model. A group
  /// stands for init_strategy_mesh(group, options.strategy).
  /// `units`: as FullyShardedDataParallel's, for models that call their blocks through a runner.
  ParallelModel(Holder module, const comm::ProcessGroup& group, const StrategyOptions& options = {},
                const std::vector<torch::nn::Module*>& units = {}, CallSite site = CallSite::here())
      : ParallelModel(std::move(module), init_strategy_mesh(group, options.strategy, 1, site),
                      options, units, site) {}
  ParallelModel(Holder module, const DeviceMesh& mesh, const StrategyOptions& options = {},
                const std::vector<torch::nn::Module*>& units = {}, CallSite site = CallSite::here())
      : ParallelModel(Parts(module, mesh, resolve(options), units, site)) {}

  /// Runs the module's forward.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return parts_.ddp ? (*parts_.ddp)(std::forward<Arguments>(arguments)...)
                      : sharded()(std::forward<Arguments>(arguments)...);
  }

  /// What this rank's optimizer updates, and what is frozen: parameters, or local shards of them.
  std::vector<LocalShard> local_shards() const {
    return parts_.ddp ? full_shards_of(**this) : sharded().local_shards();
  }
  /// What this rank, one of the checkpoint writers, writes of the module: its local shards, and on
  /// the first writer also what is not sharded, buffers and ignored parameters. train::shards_of
  /// makes a checkpoint's part of it.
  /// Errors: c10::ValueError under DDP between a forward in mixed precision and its backward.
  std::vector<LocalShard> state_to_save() const {
    return parts_.ddp ? whole_state_of(*parts_.ddp) : sharded().engine().state_to_save();
  }
  /// What every rank fills from a checkpoint, whatever strategy wrote it: all ranks get the first
  /// writer's buffers.
  /// Errors: as state_to_save.
  std::vector<LocalShard> state_to_load() const {
    return parts_.ddp ? whole_state_of(*parts_.ddp) : sharded().engine().state_to_load();
  }

  /// Whether ranks hold different shards or parts: then every rank reads a checkpoint, else any one.
  bool is_sharded() const { return parts_.sharded || this->ranks().tensor_parallel; }
  /// The ranks that write checkpoints, each its local shards; empty unless this is one of them.
  /// Their shards cover everything once; rank 0 of the whole group is the first of them.
  const comm::ProcessGroup& checkpoint_writers() const { return parts_.writers; }

 private:
  // One of the two wrappers.
  struct Parts {
    Parts(Holder& module, const DeviceMesh& mesh, const StrategyOptions& options,
          const std::vector<torch::nn::Module*>& units, CallSite site)
        : writers(checkpoint_writers_of(mesh, options.strategy, site)) {
      if (options.strategy == Strategy::kDdp)
        ddp.emplace(module, mesh, options.ddp, site);
      else
        sharded.emplace(module, mesh, options.sharding, units, site);
    }
    Holder& module() const { return ddp ? ddp->module() : sharded->module(); }
    const ModelWrapper& wrapper() const {
      return ddp ? static_cast<const ModelWrapper&>(*ddp) : *sharded;
    }

    comm::ProcessGroup writers;
    std::optional<DistributedDataParallel<Holder>> ddp;
    std::optional<FullyShardedDataParallel<Holder>> sharded;
  };

  explicit ParallelModel(Parts parts)
      : ModelHandle<Holder>(parts.module(), parts.wrapper().engine().shared_from_this(),
                            parts.wrapper().ranks()),
        parts_(std::move(parts)) {}
  const FullyShardedDataParallel<Holder>& sharded() const { return *parts_.sharded; }
  FullyShardedDataParallel<Holder>& sharded() { return *parts_.sharded; }

  Parts parts_;
};

}  // namespace cohort::parallel
