// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing of any computation: memory for time. (A run's checkpoints on disk are
// train/checkpoint.h.)
#pragma once
#include <ATen/core/Tensor.h>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Something that a body draws random numbers from beside libtorch's default generators: notes
/// where it stands, and returns what puts it back there. Of a counter that outlives the backward:
/// `[&c] { return [&c, there = c] { c = there; }; }`.
using RandomSource = std::function<std::function<void()>()>;

struct ActivationCheckpointOptions {
  /// Tensors that the body uses and that are not among its inputs, such as its modules' parameters.
  /// Leaves may be left out, unless they lie on a device that no input lies on. A tensor with a
  /// history must be listed, such as a parameter in low precision (mixed_precision_options.h).
  std::vector<at::Tensor> parameters;
  /// Both runs of the body start at the same place of libtorch's default generators: the CPU's, and
  /// those of the devices that inputs and parameters lie on.
  bool preserve_rng_state = true;
  std::vector<RandomSource> random;  ///< The same for other sources.
};

using ActivationCheckpointBody =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Returns body(inputs), of which only the inputs are kept: backward runs the body again.
///
/// Both runs record their operations, under the same autocast and with the same random numbers, so
/// results and gradients are bit-equal to those of a plain call. A module that changes when it runs
/// (batch statistics) changes twice. Gradients come to the inputs and to whatever else the body
/// uses, once each. With gradients disabled this is a plain call. Inside the body of another one it
/// is one within the other.
///
/// With sharded parameters (sharding/) the unit is outside and the activation checkpoint inside:
/// backward gathers a unit's parameters before the body runs again. A unit inside a body is
/// rejected. Under DistributedDataParallel it may be anywhere in the model.
/// Owner:   the body is kept until its part of the graph goes; sources must live until the
///          backward.
/// Memory:  during backward, what one body keeps.
/// Cost:    the body's forward once more, and in the first run a visit of each node that it
///          records.
/// Threads: as the forward around it. Local.
/// Errors:  c10::ValueError for a tensor that the body uses, that has a history, and that is
///          neither an input nor a parameter; and for a parameter computed from others that it
///          uses. c10::NotImplementedError for a backward with create_graph.
/// Source:  Chen et al. 2016, arXiv:1604.06174.
std::vector<at::Tensor> activation_checkpoint(ActivationCheckpointBody body,
                                              const std::vector<at::Tensor>& inputs,
                                              const ActivationCheckpointOptions& options = {});

/// Whether this thread is inside a body.
bool inside_activation_checkpoint();

/// The same of `call(inputs...)`: inputs and result are anything that tensor_tree.h can look into.
/// `call` is copied, a module's holder in it likewise. Of what is no tensor in the result, the
/// first run's is returned.
template <class Call, class... Inputs>
auto activation_checkpoint(const ActivationCheckpointOptions& options, Call call,
                           const Inputs&... inputs) {
  using Output = std::decay_t<decltype(call(inputs...))>;
  std::tuple<Inputs...> frame(inputs...);  // Its tensors come with each run.
  std::vector<at::Tensor> tensors;
  for_each_tensor(frame, [&](at::Tensor& tensor) { tensors.push_back(std::move(tensor)); });
  const auto output = std::make_shared<std::optional<Output>>();
  const auto body = [call = std::move(call), frame = std::move(frame),
                     first = std::weak_ptr(output)](const std::vector<at::Tensor>& given) mutable {
    std::tuple<Inputs...> filled = frame;
    size_t next = 0;
    for_each_tensor(filled, [&](at::Tensor& tensor) { tensor = given[next++]; });
    Output result = std::apply(call, filled);
    std::vector<at::Tensor> found;
    for_each_tensor(result, [&](at::Tensor& tensor) { found.push_back(std::move(tensor)); });
    if (const auto place = first.lock(); place && !*place) place->emplace(std::move(result));
    return found;
  };
  const std::vector<at::Tensor> found = activation_checkpoint(body, tensors, options);
  size_t next = 0;
  for_each_tensor(**output, [&](at::Tensor& tensor) { tensor = found[next++]; });
  return std::move(**output);
}

/// The same of block->forward(inputs...), for all of the block's parameters.
template <class Holder, class... Inputs>
auto activation_checkpoint_module(Holder block, ActivationCheckpointOptions options,
                                  const Inputs&... inputs) {
  for (const at::Tensor& parameter : block->parameters()) options.parameters.push_back(parameter);
  return activation_checkpoint(
      options, [block](const Inputs&... each) mutable { return block->forward(each...); },
      inputs...);
}

}  // namespace cohort::parallel
