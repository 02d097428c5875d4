// A Transformer's parameters by name: what they are at first, and which part of each a part of a
// divided model has.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/tensor_part.h"
#include "cohort/nmt/division.h"
#include "cohort/nmt/options.h"

namespace cohort::nmt {

/// Which part of the whole model's parameter `name` the one of shape `part_shape` is.
TensorPart part_of(const std::string& name, const std::vector<int64_t>& part_shape,
                   const TransformerOptions& options, const Division& division);

/// Draws a Transformer's parameters one after the other: all of them, in the order of registration,
/// are what `initialise` draws from the same seed. So a model made on the meta device can be filled
/// in parts.
///
/// Threads: one. Copies draw on from one generator.
class Initialiser {
 public:
  /// With a `division`, of that part of the model, which gets the whole's values.
  Initialiser(const TransformerOptions& options, uint64_t seed,
              std::shared_ptr<const Division> division = std::make_shared<Division>());
  /// Fills `parameter`, the one called `name`, in place. Memory, where the model is divided: the
  /// whole one.
  void operator()(const std::string& name, at::Tensor& parameter);

 private:
  void draw(const std::string& name, at::Tensor& whole);

  TransformerOptions options_;
  at::Generator generator_;
  std::shared_ptr<const Division> division_;
};

}  // namespace cohort::nmt
