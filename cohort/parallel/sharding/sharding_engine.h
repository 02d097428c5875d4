// What ShardedDataParallel does around the forward and backward of its units. Not a template.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/mixed_precision_options.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// What the ranks share out. Bytes a parameter in float32 under Adam, N ranks, after a backward;
/// without those of the gradient once the optimizer has forgotten it. On the way a rank holds more
/// for a moment: what the other ranks send of one bucket's gradients (a bucket is 25 MiB of
/// parameters, or one larger parameter), and from kGradients on that bucket's gradients themselves.
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
  bool prefetch = true;  ///< The next unit's parameters travel while this one computes.
  /// Slices and optimizer stay in the parameters' own type. Inputs are cast for the whole model and
  /// for every unit, outputs for the whole model.
  MixedPrecision mixed_precision;
  /// The ranks that hold the same slices as this one, across the groups that share a model out
  /// (HSDP): gradients are summed within `group`, then the sums across. With hosts of H ranks and
  /// `group` a host's, what crosses the network is the H-th part. Must outlive the model; null:
  /// nobody has the same slices.
  comm::ProcessGroup* replicate_group = nullptr;
  /// Slices, their gradients and so the optimizer live in host memory (pinned, under a model on a
  /// GPU); parameters are gathered on the model's device. A model on the CPU has them there anyway,
  /// and pays for a copy where parameters are whole.
  bool cpu_offload = false;
  /// Fills one parameter or buffer of a model that was made on the meta device, on `fill_device`;
  /// called once for each that lies on meta, parameters first, in the order of registration. Every
  /// rank calls it, and must fill in the same values. No rank then holds more than its slices and
  /// one whole parameter.
  std::function<void(const std::string& name, at::Tensor& tensor)> fill;
  c10::Device fill_device = c10::kCPU;  ///< Where the model comes to lie.
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

  bool is_unit(const torch::nn::Module& block) const { return find_unit(block).has_value(); }
  at::Tensor cast_input(const at::Tensor& input) const;
  at::Tensor cast_output(const at::Tensor& output) const;

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
