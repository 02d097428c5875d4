// SPDX-License-Identifier: Apache-2.0
// Unit<Block>: declares, where the model has a block, that it is gathered as one.
#pragma once
#include <torch/nn/pimpl.h>
#include <utility>

#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Returns forward(arguments...), the forward of `block`, within a sharded model's forward with the
/// block's parameters there and the arguments in the type it computes in, if it is one of the
/// model's units. Elsewhere this is a plain call. For models that call their blocks through a
/// runner; others declare a Unit.
template <class Forward, class... Arguments>
auto run_unit(const torch::nn::Module& block, Forward forward, Arguments&&... arguments) {
  ShardingEngine* engine = ShardingEngine::current();
  if (engine == nullptr || !engine->is_unit(block))
    return forward(std::forward<Arguments>(arguments)...);
  const auto cast = [&](const at::Tensor& tensor) { return engine->cast_input(tensor); };
  return engine->run(
      block, [&] { return forward(with_tensors(std::forward<Arguments>(arguments), cast)...); });
}

/// The base of every unit, whatever its module: FullyShardedDataParallel finds units by it.
class UnitBase {
 public:
  virtual ~UnitBase() = default;
};

/// A `Module` that is a unit, too. Its forward has the signature of Module's, of which Sequential
/// and AnyModule take the address.
template <class Module, class Signature = decltype(&Module::forward)>
class UnitImpl;

/// What the two below have in common.
template <class Module>
class UnitCall : public Module, public UnitBase {
 public:
  using Module::Module;
  /// Runs Module's forward, with its default arguments.
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    const auto forward = [this](auto&&... each) {
      return Module::forward(std::forward<decltype(each)>(each)...);
    };
    return run_unit(*this, forward, std::forward<Arguments>(arguments)...);
  }
};

template <class Module, class Base, class Result, class... Parameters>
class UnitImpl<Module, Result (Base::*)(Parameters...)> final : public UnitCall<Module> {
 public:
  using UnitCall<Module>::UnitCall;
  Result forward(Parameters... arguments) {
    return this->call(std::forward<Parameters>(arguments)...);
  }
};

template <class Module, class Base, class Result, class... Parameters>
class UnitImpl<Module, Result (Base::*)(Parameters...) const> final : public UnitCall<Module> {
 public:
  using UnitCall<Module>::UnitCall;
  Result forward(Parameters... arguments) {
    return this->call(std::forward<Parameters>(arguments)...);
  }
};

/// Declares a unit where the model has it. `Block` is a TORCH_MODULE holder whose module has one
/// forward, which is neither a template nor overloaded.
///
///   std::vector<parallel::Unit<Block>> blocks;
///   blocks.push_back(register_module("block0", parallel::Unit<Block>(64)));  // in the constructor
///   for (auto& block : blocks) x = block(x);                                 // in forward
///
/// A Unit is a holder as any: it is made from Block's arguments, names of parameters are Block's,
/// Sequential and AnyModule run it. Within the forward of a FullyShardedDataParallel its parameters
/// are gathered before it runs and freed afterwards; elsewhere it is a plain call. Units may lie in
/// one another: a parameter belongs to the innermost. A call through a reference to Block's module
/// goes past the unit, and an error names the parameter that is not there.
template <class Block>
class Unit : public torch::nn::ModuleHolder<UnitImpl<typename Block::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<UnitImpl<typename Block::ContainedType>>::ModuleHolder;
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return this->get()->call(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace cohort::parallel
