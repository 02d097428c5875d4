// SPDX-License-Identifier: Apache-2.0
// What DistributedDataParallel, FullyShardedDataParallel and ParallelModel have in common: handles
// to a module and to the engine that keeps the ranks' copies of it together.
#pragma once
#include <ATen/core/Tensor.h>
#include <concepts>
#include <memory>
#include <string>
#include <torch/nn/module.h>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

class TensorParallelLayout;

/// A TORCH_MODULE holder or a shared_ptr to a module. A module by value would be copied.
template <class T>
concept ModuleHolder = requires(T& holder) {
  { *holder } -> std::convertible_to<torch::nn::Module&>;
};

/// The part of a wrapper that stays in place when the wrapper moves. It owns the module.
class ModelEngine : public std::enable_shared_from_this<ModelEngine> {
 public:
  ModelEngine() = default;
  virtual ~ModelEngine() = default;
  ModelEngine(const ModelEngine&) = delete;
  ModelEngine& operator=(const ModelEngine&) = delete;

  /// As ModelWrapper's functions of these names.
  virtual std::vector<std::pair<std::string, at::Tensor>> named_parameters() const = 0;
  /// Those of them whose gradients backward averages over ranks.
  virtual std::vector<std::pair<std::string, at::Tensor>> averaged_parameters() const = 0;
  /// The ranks that hold different shards of the parameters; empty: each has whole ones.
  virtual comm::ProcessGroup shard_group() const = 0;
  /// Whether unsharded() of a sharded model lives: the module's parameters may be copies of shards.
  virtual bool shows_copies() const { return false; }

 protected:
  friend class NoSync;
  friend class Unsharded;
  friend class ModelWrapper;
  virtual void set_synchronized(bool on) = 0;
  virtual void unshard() = 0;
  virtual void reshard(bool write_back) = 0;
  // Gradients that are not in the tensors of named_parameters.
  virtual void drop_waiting_gradients() {}

 private:
  int num_no_sync_ = 0;  // Guards that live.
};

class ModelWrapper;

/// Gradients add up on this rank while this lives: a backward sends nothing, and the first one
/// afterwards sends the sum. The forward must run while it lives, too; of a sharded model, on every
/// rank or on none. Movable, into a std::optional for instance. Guards may overlap, and end in any
/// order: the last one counts. Local.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(const ModelWrapper& model);
  ~NoSync() {
    if (engine_ && --engine_->num_no_sync_ == 0) engine_->set_synchronized(true);
  }
  NoSync(NoSync&&) = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  std::shared_ptr<ModelEngine> engine_;
};

struct UnshardedOptions {
  /// Keep what is written into the module's parameters: each rank keeps its part of what it wrote,
  /// so every rank must write the same values.
  bool write_back = false;
};

/// The module's own parameters are whole while this lives; see ModelWrapper::unsharded.
class [[nodiscard]] Unsharded {
 public:
  explicit Unsharded(const ModelWrapper& model, const UnshardedOptions& options = {},
                     CallSite site = CallSite::here());
  ~Unsharded() { engine_->reshard(options_.write_back); }
  Unsharded(const Unsharded&) = delete;
  Unsharded& operator=(const Unsharded&) = delete;

 private:
  std::shared_ptr<ModelEngine> engine_;
  UnshardedOptions options_;
};

/// Which ranks train a model together.
struct ModelRanks {
  comm::ProcessGroup all;  ///< Also those that hold other parts of it, by tensor parallelism.
  /// What is cut, and between which ranks; null: every rank computes the model alone.
  std::shared_ptr<const TensorParallelLayout> tensor_parallel;
};

/// The base of every wrapper, whatever its module.
///
/// Owner:   a movable handle. Guards may outlive it. Autograd graphs may, too, but their backward
///          is then refused, unless a guard lives.
/// Threads: one.
/// Errors:  c10::ValueError from every function of a wrapper that was moved from.
class ModelWrapper {
 public:
  /// What an optimizer is made of: name and tensor of everything that this rank trains, each shared
  /// parameter once under its first name. Under DistributedDataParallel these are the module's
  /// parameters. Sharded, they are this rank's shards of them: one dimension, leaves with a
  /// gradient after backward, with names as in the plain model. Local.
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const {
    return engine().named_parameters();
  }
  std::vector<at::Tensor> parameters() const;

  /// Norm of the whole averaged gradient, of all parts of a tensor-parallel model, the same on every
  /// rank. Ignored parameters do not count. Within no_sync(), and until the next backward outside of
  /// it, gradients are not averaged: of a replicated model this is the norm of this rank's own.
  /// Collective where the model is sharded or tensor-parallel; blocks.
  /// Numerics: squares of the norms of single tensors add up in float64.
  /// Errors:   c10::ValueError within no_sync() of a sharded model, whose shards have no gradients
  ///           there. They have none between the end of its guard and the next backward either, and
  ///           this does not see it.
  double gradient_norm(CallSite site = CallSite::here()) const;

  /// Accumulates locally while the returned guard lives; sharded, that costs the memory of a whole
  /// gradient.
  NoSync no_sync() const { return NoSync(*this); }

  /// Resets all gradients: what an optimizer's zero_grad() resets, and what waits since no_sync() for
  /// the next backward outside of it, which of a sharded model an optimizer cannot see. Local; call
  /// it on every rank.
  void zero_grad() const;

  /// Makes the module's own parameters whole while the returned guard lives:
  ///
  ///   { auto whole = model.unsharded(); torch::save(net, path); }
  ///
  /// They have their own type, whatever type mixed_precision computes in: what is saved is what the
  /// optimizer has; under DistributedDataParallel with param_dtype this is refused between a forward
  /// and its backward. The module's own forward then runs without the other ranks. A forward or backward of the
  /// wrapper is refused where ranks hold shards. Guards may lie in one another: the outer one
  /// counts. Without write_back, write nothing into the parameters: it would be lost, or would not
  /// reach the other ranks. Of a sharded model, the guard shows the shards as they are when it
  /// begins: what changes them (a step of the optimizer, optim::AveragesInPlace) belongs before it,
  /// and a checkpoint is not loaded within it.
  /// Collective, the call; blocks. The end of the guard is local.
  Unsharded unsharded(const UnshardedOptions& options = {},
                      CallSite site = CallSite::here()) const {
    return Unsharded(*this, options, site);
  }

  ModelEngine& engine() const;
  const ModelRanks& ranks() const { return ranks_; }

 protected:
  ModelWrapper(std::shared_ptr<ModelEngine> engine, ModelRanks ranks)
      : engine_(std::move(engine)), ranks_(std::move(ranks)) {}
  ~ModelWrapper() = default;
  ModelWrapper(ModelWrapper&&) noexcept = default;
  ModelWrapper& operator=(ModelWrapper&&) noexcept = default;

  /// In the first forward, ranks that hold parts of one model compare what it gets.
  /// Collective along "tp" then; blocks.
  /// Errors: c10::ValueError, the same on these ranks, if they differ.
  template <class... Arguments>
  void check_first_inputs(const Arguments&... arguments) {
    if (!ranks_.tensor_parallel || inputs_checked_) return;
    std::vector<at::Tensor> inputs;
    const auto keep = [&](const at::Tensor& tensor) { return inputs.emplace_back(tensor); };
    const auto look_into = [&](const auto& argument) {
      if constexpr (std::is_copy_constructible_v<std::remove_cvref_t<decltype(argument)>>)
        static_cast<void>(with_tensors(argument, keep));
    };
    (look_into(arguments), ...);
    check_equal_inputs(inputs);
    inputs_checked_ = true;
  }

 private:
  void check_equal_inputs(const std::vector<at::Tensor>& inputs) const;

  std::shared_ptr<ModelEngine> engine_;
  ModelRanks ranks_;
  bool inputs_checked_ = false;
};

/// Access to a wrapper's module, as with a holder. Names carry no prefix.
template <ModuleHolder Holder>
class ModelHandle : public ModelWrapper {
 public:
  Holder& module() const {
    engine();  // checks that there is one
    return module_;
  }
  auto* operator->() const { return &*module(); }
  auto& operator*() const { return *module(); }
  operator torch::nn::Module&() const { return *module(); }  // NOLINT(google-explicit-constructor)

 protected:
  ModelHandle(Holder module, std::shared_ptr<ModelEngine> engine, ModelRanks ranks)
      : ModelWrapper(std::move(engine), std::move(ranks)), module_(std::move(module)) {}

 private:
  mutable Holder module_;
};

/// The module of a holder.
/// Errors: c10::ValueError if it is empty.
template <ModuleHolder Holder>
std::shared_ptr<torch::nn::Module> shared_module(Holder& holder) {
  TORCH_CHECK_VALUE(static_cast<bool>(holder), "expected a module, got an empty holder");
  return holder->shared_from_this();
}

}  // namespace cohort::parallel
