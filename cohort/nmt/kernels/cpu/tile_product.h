// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 matrices that are packed as tiles. On CPUs with AMX they are faster than oneDNN's, which at::mm takes,
// and a row does not depend on how many there are. With AVX512-BF16 but no AMX they are only as fast as oneDNN's, but
// sums that are wanted in float32, as a weight's gradient is, need no rounded copy on the way.
#pragma once
#include <ATen/core/Tensor.h>

namespace cohort::nmt {

/// Whether this machine has AMX.
bool has_tiles();

/// out = a b (+ bias, in each row; + out, if `add`): a [N, K] and b [K, M], either of which may be transposed; bias [M]
/// or undefined; out [N, M] of contiguous rows, in bfloat16 or, without bias, in float32, `add` for float32 alone.
/// Returns false, and does nothing, for other types and layouts, for results in bfloat16 where there is no AMX, and on CPUs
/// without AVX512-BF16.
///
/// Numerics: sums run in float32 and are rounded once; subnormal numbers count as 0. For operands of one layout an element
///           has the same bits whatever other rows and columns there are, and for any number of threads.
bool multiply_by_tiles(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool add,
                       at::Tensor& out);

/// The columns of W^T, W [M, K] bfloat16, packed for multiply_columns.
at::Tensor pack_columns(const at::Tensor& weight_MK);

/// x W^T (+ bias) of x [N, K] and what pack_columns has made of W [columns, K], N > 0. bias [columns] or undefined.
/// Numerics: as multiply_by_tiles.
at::Tensor multiply_columns(const at::Tensor& x_NK, const at::Tensor& packed, int64_t columns,
                            const at::Tensor& bias);

}  // namespace cohort::nmt
