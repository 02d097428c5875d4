// SPDX-License-Identifier: Apache-2.0
// A matrix of 8-bit whole numbers, for products of inference on the CPU.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cohort::nmt {

/// A matrix whose row i is scales[i] * values[i].
struct Int8Rows {
  at::Tensor values;  ///< int8 [out, in], in [-127, 127].
  at::Tensor scales;  ///< float32 [out], finite, not negative.
};

/// Returns the rows of `matrix`, float32 [out, in] on the CPU, as whole numbers: a row's scale is its greatest
/// magnitude / 127, its values rint(x * (127 / greatest magnitude)) in float32: to nearest, ties to even. A row of
/// nothing above 1e-36 is 0.
/// Errors: ConfigError that begins with `name` for numbers that are not finite.
Int8Rows quantize_rows(const std::string& name, const at::Tensor& matrix);

/// Rows of products with all of a matrix's rows, as Int8Matrix::scores leaves them.
struct Int8Scores {
  at::Tensor
      blocks;  ///< float32 [blocks of outputs, rows, kInt8Columns]; behind the last output undefined.
  /// float32 [rows, blocks]: the greatest of each block. Without sums NaN if one of the block is not finite.
  at::Tensor tops;
  at::Tensor
      sums;  ///< The same shape: sum of exp(x - greatest); undefined if it was not asked for.
  int64_t columns = 0;  ///< Outputs.
};

/// W of y = x W^T (+ b) as whole numbers, rearranged once for products. For inference: no gradients.
///
/// Numerics: a row of x is rounded to whole numbers as a row of W is. The sums of their products are exact; each
///           is multiplied by scale of x's row * scale of W's row and added to the bias in float32. So a row of y is a
///           function of that row of x: the same bits whatever other rows there are, on any number of threads, and
///           on every processor. A row with a number that is not finite becomes NaN.
/// Threads:  any number may multiply.
class Int8Matrix {
 public:
  Int8Matrix() = default;
  /// Keeps `scales` and a copy of the values.
  /// Errors: c10::ValueError for other shapes and types, and for more than 65,536 columns, whose sums could overflow.
  explicit Int8Matrix(const Int8Rows& rows);

  /// The matrix of some of the rows, in that order.
  /// Precondition: 0 <= each < rows.
  Int8Matrix chosen(std::span<const int32_t> rows) const;

  /// The outputs [first, first + count). x float32 [..., in] and, unless undefined, bias float32 [count]; returns
  /// float32 [..., count].
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& bias, int64_t first,
                      int64_t count) const;
  /// The same numbers for all outputs without bias of x float32 [rows, in], in blocks as they are computed.
  Int8Scores scores(const at::Tensor& x, bool with_sums) const;

  /// Whether products run in libtorch's generated kernels for 8-bit numbers, as they do on processors with
  /// AVX512-VNNI. On others the project's own loops compute the same bits.
  static bool uses_brgemm();

 private:
  // Rows of x in 8 bits.
  struct Rows {
    at::Tensor values;  // int8 [rows, rounded up; depth]
    std::vector<float> scales;
    bool by_brgemm = false;  // the values are uint8, 128 more
  };
  Rows quantized(const at::Tensor& x) const;
  // Calls put(block, first row, how many, sums) for the blocks of outputs [first, first + count).
  template <class Put>
  void for_tiles(const Rows& rows, int64_t first, int64_t count, const Put& put) const;

  at::Tensor blocks_;   // int8 [blocks of outputs, depth / 4, outputs of a block, 4]
  at::Tensor scales_;   // as given
  at::Tensor offsets_;  // int32, of every output: 128 * the sum of its values
  int64_t in_ = 0;
  int64_t depth_ = 0;  // `in_`, rounded up
};

}  // namespace cohort::nmt
