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

/// The ladder; docs/strategies.md tells when to take which.
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
};

/// Makes the mesh of all ranks of `group` that a strategy wants: one axis, "dp"; for kHybrid two,
/// "dp_replicate" across hosts and "dp_shard" within a host. With `tensor_parallel` above 1 a last
/// axis "tp" of that size: ranks that compute one model together, on one host if each host's number
/// of ranks is a multiple of it, else neighbours by number.
/// Collective; blocks. Errors: ConfigError for kHybrid on one host, and if `tensor_parallel` does
/// not divide the number of ranks; c10::ValueError for kHybrid on hosts with different numbers of
/// ranks.
DeviceMesh init_strategy_mesh(const comm::ProcessGroup& group, Strategy strategy,
                              int tensor_parallel = 1);
/// The axes of such a mesh along which ranks compute different batches: all but "tp".
DeviceMesh data_axes(const DeviceMesh& mesh);
/// The ranks of a strategy's mesh that write checkpoints, if this is one of them; else empty.
comm::ProcessGroup savers_of(const DeviceMesh& mesh, Strategy strategy);

/// Every parameter as one shard that holds all of it.
std::vector<LocalShard> full_shards_of(const torch::nn::Module& module);
/// The same of every parameter and buffer.
std::vector<LocalShard> whole_state_of(const torch::nn::Module& module);
/// Norm of the gradients that the module's parameters have. Local.
double gradient_norm_of(const torch::nn::Module& module);

/// Wraps a module holder in DistributedDataParallel or FullyShardedDataParallel, as the strategy
/// says.
///
///   parallel::ParallelModel<Model> model(module, group, {.strategy = parse_strategy(name)},
///   blocks); optim::Adam adam(model.named_local_shards()); model.backward(loss(model(batch)));
///   adam.step(rate);  adam.zero_grad();
///
/// Collective: constructor, forward, backward, gradient_norm, unshard: what the strategy exchanges.
/// Errors, numerics, threads: as those two.
template <class Holder>
class ParallelModel {
 public:
  /// `units` are the blocks that FullyShardedDataParallel gathers one by one. `mesh` has one axis,
  /// for kHybrid two: ranks along the first hold the same, ranks along the second share the model
  /// out. A group stands for init_strategy_mesh(group, options.strategy).
  ParallelModel(Holder module, const comm::ProcessGroup& group, const StrategyOptions& options = {},
                const std::vector<torch::nn::Module*>& units = {})
      : ParallelModel(module, init_strategy_mesh(group, options.strategy), options, units) {}
  ParallelModel(Holder module, const DeviceMesh& mesh, const StrategyOptions& options = {},
                const std::vector<torch::nn::Module*>& units = {})
      : module_(module), checkpoint_writers_(savers_of(mesh, options.strategy)) {
    if (options.strategy == Strategy::kDdp) {
      ddp_ = std::make_unique<DistributedDataParallel<Holder>>(module, mesh, options.ddp);
      return;
    }
    ShardingOptions sharding = options.sharding;
    sharding.shard = options.strategy == Strategy::kZero1   ? Shard::kOptimizer
                     : options.strategy == Strategy::kZero2 ? Shard::kGradients
                                                            : Shard::kParameters;
    sharded_ = std::make_unique<FullyShardedDataParallel<Holder>>(module, mesh, sharding, units);
  }

  /// Runs the module's forward.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return ddp_ ? (*ddp_)(std::forward<Arguments>(arguments)...)
                : (*sharded_)(std::forward<Arguments>(arguments)...);
  }

  /// As loss.backward(gradient): leaves the mean over ranks as the local shards' gradients.
  void backward(const at::Tensor& loss, const at::Tensor& gradient = {}) {
    ddp_ ? ddp_->backward(loss, gradient) : sharded_->backward(loss, gradient);
  }
  /// While false, gradients add up on this rank, without communication. Returns what it was.
  bool set_synchronized(bool on) {
    return ddp_ ? ddp_->engine().set_synchronized(on) : sharded_->engine().set_synchronized(on);
  }
  /// Accumulate locally while the returned guard lives; the forward must be inside, too.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(ParallelModel& model) : model_(model), before_(model.set_synchronized(false)) {}
    ~NoSync() { model_.set_synchronized(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    ParallelModel& model_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// What this rank's optimizer updates, leaves with gradients: parameters, or local shards of
  /// them.
  std::vector<LocalShard> local_shards() const {
    return ddp_ ? full_shards_of(*module_) : sharded_->local_shards();
  }
  /// Names and tensors of those that are trained: what an optimizer is made of.
  std::vector<std::pair<std::string, at::Tensor>> named_local_shards() const {
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const LocalShard& shard : local_shards())
      if (shard.tensor.requires_grad()) named.emplace_back(shard.name, shard.tensor);
    return named;
  }
  /// Of the whole gradient, the same on every rank.
  double gradient_norm() {
    return ddp_ ? gradient_norm_of(*module_) : sharded_->engine().gradient_norm();
  }

  /// Gathers the module's own tensors until `reshard`: so it can be used without the other ranks.
  /// Do not write into them meanwhile: it would be lost, or not reach the other ranks. If calls
  /// nest, the outer one counts. In between, this wrapper's forward is rejected if parameters are
  /// sharded. Blocks.
  void unshard() {
    if (sharded_) sharded_->engine().unshard();
  }
  void reshard() {
    if (sharded_) sharded_->engine().reshard(/*keep=*/false);
  }

  /// What this rank, one of the checkpoint writers, writes of the module: its local shards, and on
  /// the first writer also what is not sharded, buffers and ignored parameters. train::shards_of
  /// makes a checkpoint's part of it.
  std::vector<LocalShard> state_to_save() const {
    return ddp_ ? whole_state_of(*module_) : sharded_->engine().state_to_save();
  }
  /// What every rank fills from a checkpoint, whatever strategy wrote it: all ranks get the first
  /// writer's buffers.
  std::vector<LocalShard> state_to_load() const {
    return ddp_ ? whole_state_of(*module_) : sharded_->engine().state_to_load();
  }

  /// Whether ranks hold different shards: then every rank reads a checkpoint, else any one.
  bool is_sharded() const { return sharded_ != nullptr; }
  /// The ranks that write checkpoints, each its local shards; empty unless this is one of them.
  /// Their shards cover everything once; rank 0 of the whole group is the first of them.
  const comm::ProcessGroup& checkpoint_writers() const { return checkpoint_writers_; }

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }
  ShardingEngine* sharding() { return sharded_ ? &sharded_->engine() : nullptr; }  ///< Null: ddp.

 private:
  Holder module_;
  comm::ProcessGroup checkpoint_writers_;
  std::unique_ptr<DistributedDataParallel<Holder>> ddp_;  // one of the two
  std::unique_ptr<FullyShardedDataParallel<Holder>> sharded_;
};

/// As loss.backward(), of a loss that several models had part in.
template <class Holder, class... Holders>
void backward(const at::Tensor& loss, ParallelModel<Holder>& first, ParallelModel<Holders>&...) {
  first.backward(loss);
}

/// A ParallelModel's module is whole as long as this lives, one in another or alone. Collective,
/// the constructor.
template <class Holder>
class WholeModel {
 public:
  explicit WholeModel(ParallelModel<Holder>& model) : model_(model) { model_.unshard(); }
  ~WholeModel() { model_.reshard(); }
  WholeModel(const WholeModel&) = delete;
  WholeModel& operator=(const WholeModel&) = delete;

 private:
  ParallelModel<Holder>& model_;
};

}  // namespace cohort::parallel
