// SPDX-License-Identifier: Apache-2.0
// What FullyShardedDataParallel does around the forward and backward of its units. Not a template.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/nn/module.h>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/comm/profiler.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/mixed_precision_options.h"
#include "cohort/parallel/model_wrapper.h"
#include "cohort/parallel/tensor_parallel_plan.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// What is sharded. Bytes a parameter in float32 under Adam, N ranks, after a backward;
/// without those of the gradient once the optimizer has forgotten it. On the way a rank holds more
/// for a moment: what the other ranks send of the buckets being reduced (a bucket is 25 MiB of
/// parameters, or one larger parameter), and from kGradients on these buckets' gradients themselves.
/// Two are reduced at a time; where backward gathers, one.
///
/// Of a frozen parameter a rank holds 4 bytes, under kParameters 4/N and its unit while that runs.
enum class Shard {
  kOptimizer,   ///< ZeRO-1: 8 + 8/N. Parameters and gradients are whole on every rank.
  kGradients,   ///< ZeRO-2: 4 + 12/N. Gradients are freed as backward goes.
  kParameters,  ///< ZeRO-3, FSDP: 16/N, and the parameters of what is in no unit, of the unit that
                ///< computes and of its neighbour.
};

struct ShardingOptions {
  Shard shard = Shard::kParameters;
  /// kParameters: a unit's parameters are freed between its forward and its backward. false saves
  /// their second gathering and keeps the memory.
  bool reshard_after_forward = true;
  /// Between these two: of this many neighbours in the group (a host's, say) each keeps its part of
  /// the whole unit from its forward on, and the second gathering is among them alone. 4/ranks
  /// bytes a parameter from forward to backward. A divisor of the group's size above 1; 0: all.
  int reshard_ranks = 0;
  /// Parameters and buffers that are left alone, by their names or by those of modules which hold
  /// them: whole on every rank, of any value there, in no shard, not verified, copied, cast,
  /// gathered, summed over ranks or counted in the gradient's norm. `backward` leaves each rank's
  /// own gradient in them, for an optimizer of the caller's.
  std::vector<std::string> ignored;
  /// Names of all trained parameters that are not ignored, in the order in which forward first uses
  /// them, a shared one once, under its first name; frozen ones may be among them. Gradients are
  /// expected in reverse: a bucket of 1 MiB or more ends where forward enters another unit, and need
  /// not wait for that unit's gradients. Each trained parameter that is in no unit is then used by
  /// every rank or by none. Empty: the order of registration, and no such ends. Checkpoints load
  /// under any order; the last bits of the gradient's norm depend on it.
  std::vector<std::string> forward_order;
  bool prefetch = true;  ///< Gathers the next unit's parameters while this one computes.
  /// Local shards and optimizer stay in the parameters' own type. Inputs are cast for the whole
  /// model and for every unit, outputs for the whole model.
  MixedPrecision mixed_precision;
  /// Local shards, their gradients and so the optimizer live in host memory (pinned, under a model
  /// on a GPU, with copies that do not wait: docs/sharding.md); parameters are gathered on the
  /// model's device. For a model on the CPU this only adds a copy where parameters are whole.
  bool cpu_offload = false;
  /// Fills one parameter or buffer of a model that was made on the meta device, on `fill_device`;
  /// called once for each that lies on meta, parameters first, in the order of registration. Every
  /// rank calls it, and must fill in the same values. No rank then holds more than its shards and
  /// one whole parameter.
  std::function<void(const std::string& name, at::Tensor& tensor)> fill;
  c10::Device fill_device = c10::kCPU;  ///< Where the model comes to lie: as the group's device().
  /// What the ranks along the mesh's axis "tp" hold in parts; needed if there is such an axis.
  std::optional<TensorParallelPlan> tensor_parallel;
};

/// The options as the engine has them.
struct ShardingEngineOptions : ShardingOptions {
  comm::ProcessGroup replicate_group;  ///< ShardingGroups::replicate.
};

/// One rank's shard of a parameter or buffer: the elements [begin, end), counted row by row. What a
/// rank holds whole (of a replicated model, buffers, ignored parameters) keeps its shape here.
struct LocalShard {
  std::string name;            ///< The parameter's, as in the plain model.
  std::vector<int64_t> shape;  ///< The whole parameter's.
  int64_t begin = 0;
  int64_t end = 0;
  at::Tensor tensor;  ///< One dimension; a leaf with a gradient after backward.
};

/// Shards a model.
/// Owner:   FullyShardedDataParallel; owns the model.
/// Threads: one.
class ShardingEngine final : public ModelEngine {
 public:
  /// The units are those that the model declares (unit.h) and `units`.
  ShardingEngine(std::shared_ptr<torch::nn::Module> model, const ShardingGroups& groups,
                 const ShardingOptions& options, const std::vector<torch::nn::Module*>& units);
  ~ShardingEngine() override;

  /// The engine whose model's forward this thread is in; null outside.
  static ShardingEngine* current();

  /// Marks a forward of the whole model, for `current`.
  class Forward {
   public:
    explicit Forward(ShardingEngine& engine);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    ShardingEngine* const outer_;
    ShardingEngine& engine_;
    const int exceptions_;
  };

  /// Calls `forward` with the unit's parameters there; plainly if `block` is no unit.
  template <class Call>
  auto run(const torch::nn::Module& block, Call forward) {
    const auto index = find_unit(block);
    if (!index) return forward();
    const ProfileScope scope(forward_label(*index));
    const uint64_t position = before_forward(*index);
    auto output = forward();
    std::vector<at::Tensor*> tensors;
    for_each_tensor(output, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
    after_forward(*index, tensors, position);
    return output;
  }

  /// Whether `block` is a unit below the model.
  bool is_unit(const torch::nn::Module& block) const { return find_unit(block).value_or(0) > 0; }
  at::Tensor cast_input(const at::Tensor& input) const;
  at::Tensor cast_output(const at::Tensor& output) const;

  const std::vector<LocalShard>& local_shards() const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;
  std::vector<std::pair<std::string, at::Tensor>> averaged_parameters() const override {
    return named_parameters();
  }
  comm::ProcessGroup shard_group() const override { return group(); }
  bool shows_copies() const override;

  /// What each rank of `group` writes into a checkpoint: its local shards, and on the group's first
  /// rank also what is not sharded, buffers and ignored parameters.
  std::vector<LocalShard> state_to_save() const;
  /// What each rank fills from a checkpoint: its local shards and, on every rank, what is not
  /// sharded.
  std::vector<LocalShard> state_to_load() const;

  int64_t num_units() const;
  comm::ProcessGroup group() const;  ///< The ranks that share the model out.
  bool is_first_replica() const;     ///< Of the ranks that hold the same shards.

 private:
  // false inside no_sync.
  void set_synchronized(bool on) override;
  void drop_waiting_gradients() override;
  // Gathers all parameters, so that the module's own tensors are whole, until `reshard`. Within
  // another `unshard` they are whole until the outer one's `reshard`. Collective; blocks.
  // Errors: c10::ValueError inside a forward of the wrapped model.
  void unshard() override;
  void reshard(bool write_back) override;

  std::optional<size_t> find_unit(const torch::nn::Module& block) const;
  const std::string& forward_label(size_t unit) const;  // For the profiler.
  uint64_t before_forward(size_t unit);
  void after_forward(size_t unit, const std::vector<at::Tensor*>& outputs, uint64_t position);

  struct Impl;
  std::shared_ptr<Impl> impl_;  // graphs refer to it
};

}  // namespace cohort::parallel
