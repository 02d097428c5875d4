// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/int8_matrix.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <torch/types.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

constexpr int64_t kMaxDepth = 65'536;  // 255 * 127 * 65,536 < 2^31
constexpr int64_t kDepthUnit = 64;     // of the kernels for AMX; others have 4
// Kernels are generated for each number of rows up to kTileRows that kRowUnit divides.
constexpr int64_t kTileRows = 64;
constexpr int64_t kRowUnit = 4;

int64_t rounded_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// sums [rows, kInt8Columns] of rows [rows, depth] and a block of the matrix.
void product_by_brgemm(const uint8_t* rows, int64_t num_rows, int64_t depth, const int8_t* block,
                       int32_t* sums) {
  at::native::cpublas::brgemm(num_rows, kInt8Columns, depth, depth, kInt8Columns, kInt8Columns,
                              /*add_C=*/false, rows, reinterpret_cast<const signed char*>(block),
                              sums);
}

// libtorch does not say where it has these kernels, and oneDNN's for AVX-512 without VNNI overflow
// (as do those for int8 x int8 without AMX, which therefore are not used): so one product of the
// greatest numbers is tried.
bool brgemm_is_exact() {
  constexpr int64_t kRows = 3;
  const std::vector<uint8_t> rows(kRows * kDepthUnit, 255);
  std::vector<int8_t> block(kDepthUnit * kInt8Columns, 127);
  std::fill_n(block.begin(), block.size() / 2, -128);
  std::vector<int32_t> found(kRows * kInt8Columns), expected(found);
  try {
    product_by_brgemm(rows.data(), kRows, kDepthUnit, block.data(), found.data());
    at::native::cpublas::brgemm_release();
  } catch (const c10::Error&) {
    return false;
  }
  const std::vector<int8_t> values(rows.size(), 127);
  loops().int8.product(values.data(), kRows, kDepthUnit, block.data(), expected.data());
  const int64_t offset =
      128 * std::accumulate(block.begin(), block.end(), int64_t{0}) / kInt8Columns;
  return std::ranges::equal(found, expected, {}, {}, [&](int32_t sum) { return sum + offset; });
}

}  // namespace

bool Int8Matrix::uses_brgemm() {
  static const bool exact = at::globalContext().userEnabledMkldnn() && brgemm_is_exact();
  // Tests name the table of loops to see that other processors compute the same.
  return exact && at::globalContext().userEnabledMkldnn() && &loops() == supported_loops()[0];
}

Int8Rows quantize_rows(const std::string& name, const at::Tensor& matrix) {
  TORCH_CHECK_VALUE(matrix.is_cpu() && matrix.scalar_type() == at::kFloat && matrix.dim() == 2,
                    name, ": expected a float32 matrix on the CPU, got ", matrix.toString(), " ",
                    matrix.sizes());
  const at::Tensor given = matrix.detach().contiguous();
  const int64_t width = given.size(1);
  Int8Rows rows{at::empty(given.sizes(), at::kChar), at::empty({given.size(0)}, at::kFloat)};
  for (int64_t i = 0; i < given.size(0); ++i) {
    const float scale = loops().int8.quantize(given.const_data_ptr<float>() + i * width, width,
                                              rows.values.mutable_data_ptr<int8_t>() + i * width);
    if (std::isnan(scale)) {
      throw ConfigError(name + ": expected finite numbers, got NaN or infinity in row " +
                        std::to_string(i));
    }
    rows.scales.mutable_data_ptr<float>()[i] = scale;
  }
  return rows;
}

Int8Matrix::Int8Matrix(const Int8Rows& rows) : scales_(rows.scales.contiguous()) {
  const at::Tensor& values = rows.values;
  TORCH_CHECK_VALUE(values.is_cpu() && values.scalar_type() == at::kChar && values.dim() == 2 &&
                        scales_.is_cpu() && scales_.scalar_type() == at::kFloat &&
                        scales_.sizes() == at::IntArrayRef({values.size(0)}),
                    "an int8 matrix: expected int8 [out, in] and float32 [out] on the CPU, got ",
                    values.toString(), " ", values.sizes(), " and ", scales_.toString(), " ",
                    scales_.sizes());
  in_ = values.size(1);
  TORCH_CHECK_VALUE(in_ >= 1 && in_ <= kMaxDepth, "an int8 matrix: expected 1 to ", kMaxDepth,
                    " columns, got ", in_);
  depth_ = rounded_up(in_, kDepthUnit);
  const int64_t outputs = rounded_up(values.size(0), kInt8Columns);
  const at::Tensor padded = at::zeros({outputs, depth_}, at::kChar);
  padded.narrow(0, 0, values.size(0)).narrow(1, 0, in_).copy_(values);
  blocks_ = padded.view({outputs / kInt8Columns, kInt8Columns, depth_ / 4, 4})
                .permute({0, 2, 1, 3})
                .contiguous();
  offsets_ = values.sum(1, /*keepdim=*/false, at::kLong).mul_(128).to(at::kInt);
}

Int8Matrix Int8Matrix::chosen(std::span<const int32_t> rows) const {
  Int8Matrix result;
  result.in_ = in_;
  result.depth_ = depth_;
  const int64_t count = std::ssize(rows);
  const at::Tensor index =
      at::tensor(at::ArrayRef<int32_t>(rows.data(), rows.size())).to(at::kLong);
  result.scales_ = scales_.index_select(0, index);
  result.offsets_ = offsets_.index_select(0, index);
  result.blocks_ = at::zeros(
      {rounded_up(count, kInt8Columns) / kInt8Columns, depth_ / 4, kInt8Columns, 4}, at::kChar);
  // Four numbers at a time stay side by side.
  const int64_t fours = depth_ / 4;
  const auto* from = static_cast<const int32_t*>(blocks_.const_data_ptr());
  auto* to = static_cast<int32_t*>(result.blocks_.mutable_data_ptr());
  const auto place = [&](int64_t row) {
    return row / kInt8Columns * fours * kInt8Columns + row % kInt8Columns;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* source = from + place(rows[static_cast<size_t>(i)]);
    int32_t* target = to + place(i);
    for (int64_t k = 0; k < fours; ++k) target[k * kInt8Columns] = source[k * kInt8Columns];
  }
  return result;
}

Int8Matrix::Rows Int8Matrix::quantized(const at::Tensor& x) const {
  TORCH_CHECK_VALUE(x.is_cpu() && x.scalar_type() == at::kFloat && x.size(-1) == in_,
                    "an int8 product: expected float32 rows of ", in_, " on the CPU, got ",
                    x.toString(), " ", x.sizes());
  const at::Tensor given = x.reshape({-1, in_}).contiguous();
  const int64_t num_rows = given.size(0);
  const bool by_brgemm = uses_brgemm();
  // What is behind `in_` meets zeros of the matrix.
  Rows rows{.values = at::zeros({by_brgemm ? rounded_up(num_rows, kRowUnit) : num_rows, depth_},
                                at::kChar),
            .scales = std::vector<float>(static_cast<size_t>(num_rows)),
            .by_brgemm = by_brgemm};
  for (int64_t r = 0; r < num_rows; ++r) {
    rows.scales[static_cast<size_t>(r)] =
        loops().int8.quantize(given.const_data_ptr<float>() + r * in_, in_,
                              rows.values.mutable_data_ptr<int8_t>() + r * depth_);
  }
  if (by_brgemm) rows.values = rows.values.view(at::kByte).bitwise_xor_(128);
  return rows;
}

template <class Put>
void Int8Matrix::for_tiles(const Rows& rows, int64_t first, int64_t count, const Put& put) const {
  const auto num_rows = static_cast<int64_t>(rows.scales.size());
  const int64_t num_padded = rows.values.size(0);
  const auto* blocks = blocks_.const_data_ptr<int8_t>();
  const void* values = rows.values.const_data_ptr();
  const auto product = [&](int64_t top, int64_t n, const int8_t* block, int32_t* sums) {
    if (rows.by_brgemm) {
      product_by_brgemm(static_cast<const uint8_t*>(values) + top * depth_, n, depth_, block, sums);
    } else {
      loops().int8.product(static_cast<const int8_t*>(values) + top * depth_, n, depth_, block,
                           sums);
    }
  };
  const auto multiply_blocks = [&](int64_t begin, int64_t end) {
    alignas(64) int32_t sums[kTileRows * kInt8Columns];
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t top = 0; top < num_rows; top += kTileRows) {
        product(top, std::min(kTileRows, num_padded - top), blocks + block * kInt8Columns * depth_,
                sums);
        put(block, top, std::min(kTileRows, num_rows - top), sums);
      }
    }
    if (rows.by_brgemm) at::native::cpublas::brgemm_release();
  };
  constexpr int64_t kProductsOfATask = int64_t{1} << 22;
  at::parallel_for(first / kInt8Columns, (first + count - 1) / kInt8Columns + 1,
                   1 + kProductsOfATask / (num_padded * depth_ * kInt8Columns), multiply_blocks);
}

at::Tensor Int8Matrix::multiply(const at::Tensor& x, const at::Tensor& bias, int64_t first,
                                int64_t count) const {
  TORCH_CHECK_VALUE(first >= 0 && count >= 0 && first + count <= scales_.size(0),
                    "an int8 product: outputs from ", first, ", ", count, " of them: there are ",
                    scales_.size(0));
  const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
  TORCH_CHECK_VALUE(!bias.defined() || (added.is_cpu() && added.scalar_type() == at::kFloat &&
                                        added.sizes() == at::IntArrayRef({count})),
                    "an int8 product: expected a float32 bias of ", count, " on the CPU, got ",
                    added.toString(), " ", added.sizes());
  const Rows rows = quantized(x);
  const at::Tensor out = at::empty({std::ssize(rows.scales), count}, at::kFloat);
  auto shape = x.sizes().vec();
  shape.back() = count;
  if (out.numel() == 0) return out.view(shape);
  const auto* scales = scales_.const_data_ptr<float>();
  const auto* offsets = rows.by_brgemm ? offsets_.const_data_ptr<int32_t>() : nullptr;
  const float* added_data = added.defined() ? added.const_data_ptr<float>() : nullptr;
  auto* out_data = out.mutable_data_ptr<float>();
  for_tiles(rows, first, count,
            [&](int64_t block, int64_t top, int64_t num_rows, const int32_t* sums) {
              const int64_t left = std::max(first, block * kInt8Columns);
              const int64_t right = std::min(first + count, (block + 1) * kInt8Columns);
              loops().int8.scale({.sums = sums + left - block * kInt8Columns,
                                  .rows = num_rows,
                                  .columns = right - left,
                                  .row_scales = rows.scales.data() + top,
                                  .scales = scales + left,
                                  .offsets = offsets ? offsets + left : nullptr,
                                  .bias = added_data ? added_data + left - first : nullptr,
                                  .out = out_data + top * count + left - first,
                                  .out_stride = count});
            });
  return out.view(shape);
}

Int8Scores Int8Matrix::scores(const at::Tensor& x, bool with_sums) const {
  TORCH_CHECK_VALUE(x.dim() == 2, "8-bit scores: expected [rows, in], got ", x.sizes());
  const Rows rows = quantized(x);
  const int64_t count = std::ssize(rows.scales);
  const int64_t num_blocks = blocks_.size(0);
  const int64_t columns = scales_.size(0);
  Int8Scores found{.blocks = at::empty({num_blocks, count, kInt8Columns}, at::kFloat),
                   .tops = at::empty({count, num_blocks}, at::kFloat),
                   .sums = {},
                   .columns = columns};
  if (with_sums) found.sums = at::empty_like(found.tops);
  if (count == 0) return found;
  const auto* scales = scales_.const_data_ptr<float>();
  const auto* offsets = rows.by_brgemm ? offsets_.const_data_ptr<int32_t>() : nullptr;
  auto* out = found.blocks.mutable_data_ptr<float>();
  auto* tops = found.tops.mutable_data_ptr<float>();
  float* sums_of_exp = with_sums ? found.sums.mutable_data_ptr<float>() : nullptr;
  for_tiles(rows, 0, columns,
            [&](int64_t block, int64_t top, int64_t num_rows, const int32_t* sums) {
              const int64_t left = block * kInt8Columns;
              const int64_t at = top * num_blocks + block;
              loops().int8.scale({.sums = sums,
                                  .rows = num_rows,
                                  .columns = std::min(kInt8Columns, columns - left),
                                  .row_scales = rows.scales.data() + top,
                                  .scales = scales + left,
                                  .offsets = offsets ? offsets + left : nullptr,
                                  .out = out + (block * count + top) * kInt8Columns,
                                  .out_stride = kInt8Columns,
                                  .tops = tops + at,
                                  .sums_of_exp = sums_of_exp ? sums_of_exp + at : nullptr,
                                  .tops_stride = num_blocks});
            });
  return found;
}

}  // namespace cohort::nmt
