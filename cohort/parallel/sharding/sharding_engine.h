// What ShardedDataParallel does around the forward and backward of its units. Not a template.
#pragma once
#include <ATen/core/Tensor.h>
#include <memory>
#include <optional>
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// What the ranks share out. Bytes a parameter in float32 under Adam, N ranks, at rest:
enum class Shard {
  kOptimizer,   ///< ZeRO-1: 8 + 8/N. Parameters and gradients are whole on every rank.
  kGradients,   ///< ZeRO-2: 4 + 12/N. Gradients are freed as backward goes.
  kParameters,  ///< ZeRO-3, FSDP: 16/N, and a unit's parameters while it computes.
};

struct ShardingOptions {
  Shard shard = Shard::kParameters;
  /// kParameters: a unit's parameters are freed between its forward and its backward. false saves
  /// their second gathering and keeps the memory.
  bool reshard_after_forward = true;
  bool prefetch = true;  ///< The next unit's parameters travel while this one computes.
  /// The type that parameters are gathered and computed in, if it is another than theirs, in which
  /// slices and optimizer stay.
  std::optional<at::ScalarType> param_dtype;
  std::optional<at::ScalarType> reduce_dtype;  ///< That gradients travel in.
};

/// The elements [begin, end) of a parameter, counted row by row, that this rank holds.
struct ParameterSlice {
  std::string name;            ///< The parameter's, as in the plain model.
  std::vector<int64_t> shape;  ///< The whole parameter's.
  int64_t begin = 0;
  int64_t end = 0;
  at::Tensor tensor;  ///< One dimension; a leaf with a gradient after backward.
};

/// Shards a model. Owner: ShardedDataParallel; references to model and group must outlive it.
/// Threads: one.
class ShardingEngine {
 public:
  ShardingEngine(torch::nn::Module& model, comm::ProcessGroup& group,
                 const ShardingOptions& options, const std::vector<torch::nn::Module*>& units);
  ~ShardingEngine();

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
    ShardingEngine* outer_;
  };

  /// Calls `forward` with the unit's parameters there; plainly if `block` is no unit.
  template <class Call>
  auto run(const torch::nn::Module& block, Call forward) {
    const auto index = find_unit(block);
    if (!index) return forward();
    before_forward(*index);
    auto output = forward();
    std::vector<at::Tensor> tensors;
    for_each_tensor(output, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
    after_forward(*index, tensors);
    return output;
  }

  void backward(const at::Tensor& loss, const at::Tensor& gradient);
  bool set_synchronized(bool on);  ///< Returns what it was; false inside no_sync.

  const std::vector<ParameterSlice>& slices() const;
  /// Norm of the whole gradient, the same on every rank. Collective; blocks.
  double gradient_norm();

  /// Gathers all parameters, so that the module's own tensors are whole; `release` frees them, and
  /// with `keep` this rank's part of what was written into them stays. Collective; blocks.
  void summon();
  void release(bool keep);

  int64_t num_units() const;

 private:
  std::optional<size_t> find_unit(const torch::nn::Module& block) const;
  void before_forward(size_t unit);
  void after_forward(size_t unit, const std::vector<at::Tensor>& outputs);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::parallel
