// SPDX-License-Identifier: Apache-2.0
// A Transformer's parameters by name: initial values, and which part of each a shard of a
// tensor-parallel model holds.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/tensor_part.h"
#include "cohort/nmt/options.h"
#include "cohort/nmt/tensor_parallel_context.h"

namespace cohort::nmt {

/// Which part of the unsharded model's parameter `name` a shard's of shape `part_shape` is.
TensorPart part_of(const std::string& name, const std::vector<int64_t>& part_shape,
                   const TransformerOptions& options, const TensorParallelContext& tensor_parallel);

/// Draws a Transformer's parameters one after the other: all of them, in the order of registration,
/// are what `initialise` draws from the same seed. So a model made on the meta device can be filled
/// one parameter at a time.
///
/// Threads: one. Copies draw on from one generator.
class Initialiser {
 public:
  /// With a `tensor_parallel` context, of that shard of the model, which gets the unsharded model's
  /// values.
  Initialiser(const TransformerOptions& options, uint64_t seed,
              std::shared_ptr<const TensorParallelContext> tensor_parallel =
                  std::make_shared<TensorParallelContext>());
  /// Fills `parameter`, the one called `name`, in place. Memory, where the model is sharded: the
  /// unsharded parameter.
  void operator()(const std::string& name, at::Tensor& parameter);

 private:
  void draw(const std::string& name, at::Tensor& whole);

  TransformerOptions options_;
  at::Generator generator_;
  std::shared_ptr<const TensorParallelContext> tensor_parallel_;
};

}  // namespace cohort::nmt
