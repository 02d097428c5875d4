// Gradient checkpointing: memory for time.
#pragma once
#include <ATen/core/Tensor.h>
#include <functional>
#include <vector>

#include "cohort/nmt/fused.h"

namespace cohort::nmt {

using RecomputedBody = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

/// Returns body(inputs), of which only the inputs are kept: backward runs the body again.
///
/// The body computes a tensor from `inputs`, `parameters` (leaves that it knows by itself) and
/// dropout of `stream`, nothing else that has a gradient. Both runs record their operations and
/// start at the same place of the stream, so results and gradients are bit-equal to those of a
/// plain call. With gradients disabled this is a plain call.
/// Owner:  `stream` must outlive the backward; the body is kept until then.
/// Memory: during backward, what one body keeps. Cost: the body's forward once more.
/// Source: Chen et al. 2016, arXiv:1604.06174.
at::Tensor recomputed(RecomputedBody body, const std::vector<at::Tensor>& inputs,
                      const std::vector<at::Tensor>& parameters, DropoutStream& stream);

}  // namespace cohort::nmt
