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
#include "cohort/parallel/sharding/sharded_data_parallel.h"

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
  ShardingOptions sharding;            ///< Of the others, which set `shard` and `replicate_group`.
};

/// Which ranks share a model out, and which write it. Not a template.
class StrategyGroups {
 public:
  /// Collective; blocks. Errors: ConfigError for kHybrid if there is one host, or hosts have
  /// different numbers of ranks.
  StrategyGroups(const comm::ProcessGroup& group, Strategy strategy);

  const comm::ProcessGroup& shards() const { return hosts_.row ? hosts_.row : group_; }
  const comm::ProcessGroup& replicas() const { return hosts_.column; }  ///< Empty: none.
  const comm::ProcessGroup& savers() const { return savers_; }  ///< Empty: this rank is none.

 private:
  comm::ProcessGroup group_;
  RankGrid hosts_;  // kHybrid
  comm::ProcessGroup savers_;
};

/// Every parameter as one slice that is all of it.
std::vector<ParameterSlice> whole_slices_of(const torch::nn::Module& module);
/// The same of every parameter and buffer.
std::vector<ParameterSlice> whole_state_of(const torch::nn::Module& module);
/// Norm of the gradients that the module's parameters have. Local.
double gradient_norm_of(const torch::nn::Module& module);

/// Wraps a module holder in DistributedDataParallel or ShardedDataParallel, as the strategy says.
///
///   parallel::ParallelModel<Model> model(module, group, {.strategy = parse_strategy(name)},
///   blocks); optim::Adam adam(model.named_slices()); model.backward(loss(model(batch)));
///   adam.step(rate);  adam.zero_grad();
///
/// Collective: constructor, forward, backward, gradient_norm, summon: what the strategy exchanges.
/// Errors, numerics, threads: as those two.
template <class Holder>
class ParallelModel {
 public:
  /// `units` are the blocks that ShardedDataParallel gathers one by one.
  ParallelModel(Holder module, const comm::ProcessGroup& group, const StrategyOptions& options = {},
                const std::vector<torch::nn::Module*>& units = {})
      : module_(module), groups_(group, options.strategy) {
    if (options.strategy == Strategy::kDdp) {
      ddp_ = std::make_unique<DistributedDataParallel<Holder>>(module, group, options.ddp);
      return;
    }
    ShardingOptions sharding = options.sharding;
    sharding.shard = options.strategy == Strategy::kZero1   ? Shard::kOptimizer
                     : options.strategy == Strategy::kZero2 ? Shard::kGradients
                                                            : Shard::kParameters;
    sharding.replicate_group = groups_.replicas();
    sharded_ =
        std::make_unique<ShardedDataParallel<Holder>>(module, groups_.shards(), sharding, units);
  }

  /// Runs the module's forward.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return ddp_ ? (*ddp_)(std::forward<Arguments>(arguments)...)
                : (*sharded_)(std::forward<Arguments>(arguments)...);
  }

  /// As loss.backward(gradient): leaves the mean over ranks as the slices' gradients.
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

  /// What this rank's optimizer updates, leaves with gradients: parameters, or slices of them.
  std::vector<ParameterSlice> slices() const {
    return ddp_ ? whole_slices_of(*module_) : sharded_->slices();
  }
  /// Names and tensors of those that are trained: what an optimizer is made of.
  std::vector<std::pair<std::string, at::Tensor>> named_slices() const {
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const ParameterSlice& slice : slices())
      if (slice.tensor.requires_grad()) named.emplace_back(slice.name, slice.tensor);
    return named;
  }
  /// Of the whole gradient, the same on every rank.
  double gradient_norm() {
    return ddp_ ? gradient_norm_of(*module_) : sharded_->engine().gradient_norm();
  }

  /// Makes the module's own tensors whole, and those of all slices, until `release`: so it can be
  /// used without the other ranks. Do not write into them meanwhile: it would be lost, or not reach
  /// the other ranks. Of one in another, the outer one counts. Between them this wrapper's forward
  /// is refused where ranks hold slices. Blocks.
  void summon() {
    if (sharded_) sharded_->engine().summon();
  }
  void release() {
    if (sharded_) sharded_->engine().release(/*keep=*/false);
  }

  /// What this rank, one of the savers, writes into a checkpoint of the module: its slices, and on
  /// the first saver what is not shared out, buffers and ignored parameters. train::slices_of makes
  /// a checkpoint's part of it.
  std::vector<ParameterSlice> state_to_save() const {
    return ddp_ ? whole_state_of(*module_) : sharded_->engine().state_to_save();
  }
  /// What every rank fills from one, whatever strategy wrote it: all ranks get the first saver's
  /// buffers.
  std::vector<ParameterSlice> state_to_load() const {
    return ddp_ ? whole_state_of(*module_) : sharded_->engine().state_to_load();
  }

  /// Whether ranks hold different slices: then every rank reads a checkpoint, else any one.
  bool is_sharded() const { return sharded_ != nullptr; }
  /// The ranks that write checkpoints, each its slices; empty unless this is one of them. Together
  /// they hold everything once; rank 0 of the whole group is their first.
  const comm::ProcessGroup& savers() const { return groups_.savers(); }

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }
  ShardingEngine* sharding() { return sharded_ ? &sharded_->engine() : nullptr; }  ///< Null: ddp.

 private:
  Holder module_;
  StrategyGroups groups_;
  std::unique_ptr<DistributedDataParallel<Holder>> ddp_;  // one of the two
  std::unique_ptr<ShardedDataParallel<Holder>> sharded_;
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
  explicit WholeModel(ParallelModel<Holder>& model) : model_(model) { model_.summon(); }
  ~WholeModel() { model_.release(); }
  WholeModel(const WholeModel&) = delete;
  WholeModel& operator=(const WholeModel&) = delete;

 private:
  ParallelModel<Holder>& model_;
};

}  // namespace cohort::parallel
