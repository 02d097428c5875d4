// SPDX-License-Identifier: Apache-2.0
// Which tensors of a model the ranks of a tensor-parallel group hold in parts: an option of the
// wrappers.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace cohort::parallel {

/// How a tensor is cut: of dimension `dim`, rank r of K has cut_of(size, r, K) of
/// base/tensor_part.h.
struct TensorCut {
  int64_t dim = 0;
  /// Dimension `dim` is so many blocks of equal size, each cut on its own: 3 where one matrix
  /// holds query, key and value.
  int64_t blocks = 1;
  /// The ranks' parts may begin with the same values, as heads that were repeated do. Wrappers
  /// refuse others that do: each rank probably has the whole.
  bool equal_parts = false;
};

/// Cuts by the names of parameters and buffers in the plain model. All others are replicated: the
/// same on every rank of the group. For two products in a row:
///
///   {{"first.weight", {.dim = 0}}, {"first.bias", {.dim = 0}}, {"second.weight", {.dim = 1}}}
using TensorParallelPlan = std::map<std::string, TensorCut>;

}  // namespace cohort::parallel
