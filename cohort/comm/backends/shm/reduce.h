// SPDX-License-Identifier: Apache-2.0
// Reductions of what the ranks have in memory, in the order of ranks.
#pragma once
#include <c10/core/ScalarType.h>
#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace cohort::comm {

/// A reduction, checked.
struct Reduction {
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  double divisor = 1;  ///< Of the sum: the world size of AVG.
  double factor = 1;   ///< Of the sum: that of PREMUL_SUM.
  c10::ScalarType type = c10::ScalarType::Float;
};

/// Returns the reduction of `world_size` tensors of `type`.
///
/// PREMUL_SUM takes a number; min, max, and bitwise operations no complex numbers, bitwise ones
/// no floating types, AVG and PREMUL_SUM no integers; bool is "or" of a sum, "and" of a product.
/// Errors: c10::ValueError for what cannot be reduced so.
Reduction reduction_of(const c10d::ReduceOp& op, c10::ScalarType type, int world_size);

/// Writes to out[i] the reduction of inputs[0][i], inputs[1][i], ... in that order. bfloat16 and
/// float16 are reduced in float32 and rounded once; a NaN of min and max stays. `out` may be one
/// of the inputs. Alignment: the type's.
void reduce(const Reduction& reduction, void* out, const std::vector<const std::byte*>& inputs,
            int64_t numel);

}  // namespace cohort::comm
