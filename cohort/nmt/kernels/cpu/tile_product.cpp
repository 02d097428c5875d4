// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/cpu/tile_product.h"

#include <ATen/Parallel.h>
#include <algorithm>
#include <string_view>
#include <torch/types.h>

#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

const PanelLoops& panel_loops() {
  return supported_loops()[0]->panels;
}

int64_t padded(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Elements of the panels of `size` rows or columns.
int64_t packed_size(int64_t size, int64_t depth) {
  return padded(size, kPanelWidth) * padded(depth, kPanelDepth);
}

const BFloat16Bits* bits_of(const at::Tensor& tensor) {
  return static_cast<const BFloat16Bits*>(tensor.const_data_ptr());
}
BFloat16Bits* mutable_bits_of(const at::Tensor& tensor) {
  return static_cast<BFloat16Bits*>(tensor.mutable_data_ptr());
}

at::Tensor panel_room(int64_t elements) {
  return at::empty({elements}, at::kBFloat16);
}

// [outer, along the sum]
MatrixBits matrix_of(const at::Tensor& tensor) {
  return {.data = bits_of(tensor), .outer = tensor.stride(0), .inner = tensor.stride(1)};
}

MatrixBits part_from(const MatrixBits& m, int64_t first, int64_t k) {
  return {.data = m.data + first * m.outer + k * m.inner, .outer = m.outer, .inner = m.inner};
}

bool is_matrix(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 2 &&
         (tensor.stride(0) == 1 || tensor.stride(1) == 1);
}

// A part of a product that one thread makes, or the whole.
struct TileTask {
  MatrixBits a, b;  // [rows, depth] and [columns, depth]
  int64_t rows = 0, columns = 0, depth = 0;
  const float* bias = nullptr;
  bool add = false;
  float* sums = nullptr;
  BFloat16Bits* out = nullptr;
  int64_t stride = 0;
};

// Packed columns stay in a core's second cache, a panel of rows in its first. Deeper sums are cut: what is transposed is
// read from `depth` places at once.
constexpr int64_t kPackedElements = int64_t{1} << 19;
constexpr int64_t kDepth = 2048, kTransposedDepth = 1024;

void run_task(TileTask task) {
  const int64_t most = task.a.inner == 1 ? kDepth : kTransposedDepth;
  const int64_t cuts = (task.depth + most - 1) / most;
  const int64_t depth = padded((task.depth + cuts - 1) / cuts, kPanelDepth);
  const int64_t blocks =
      std::max<int64_t>(1, (task.columns * depth + kPackedElements - 1) / kPackedElements);
  const int64_t columns = padded((task.columns + blocks - 1) / blocks, kPanelWidth);
  const at::Tensor row_panel = panel_room(packed_size(kPanelWidth, depth)),
                   column_panels = panel_room(packed_size(columns, depth));
  at::Tensor scratch;
  int64_t sums_stride = task.stride;
  if (task.sums == nullptr && cuts > 1) {
    scratch = at::empty({task.rows, task.columns}, at::kFloat);
    task.sums = scratch.mutable_data_ptr<float>();
    sums_stride = task.columns;
  }
  for (int64_t k = 0; k < task.depth; k += depth) {
    const int64_t deep = std::min(depth, task.depth - k);
    const bool is_last = k + depth >= task.depth;
    for (int64_t column = 0; column < task.columns; column += columns) {
      const int64_t wide = std::min(columns, task.columns - column);
      panel_loops().pack_columns(part_from(task.b, column, k), wide, deep,
                                 mutable_bits_of(column_panels));
      for (int64_t row = 0; row < task.rows; row += kPanelWidth) {
        const int64_t high = std::min(kPanelWidth, task.rows - row);
        panel_loops().pack_rows(part_from(task.a, row, k), high, deep, mutable_bits_of(row_panel));
        const bool rounds = is_last && task.out != nullptr;
        panel_loops().multiply(
            {.row_panels = bits_of(row_panel),
             .column_panels = bits_of(column_panels),
             .rows = high,
             .columns = wide,
             .depth = deep,
             .add = k > 0 || task.add,
             .sums = task.sums == nullptr ? nullptr : task.sums + row * sums_stride + column,
             .sums_stride = sums_stride,
             .bias = rounds && task.bias != nullptr ? task.bias + column : nullptr,
             .out = rounds ? task.out + row * task.stride + column : nullptr,
             .out_stride = task.stride});
      }
    }
  }
}

// The part of `whole` from (row, column) on.
TileTask part_of(const TileTask& whole, int64_t row, int64_t column) {
  TileTask part = whole;
  part.a = part_from(whole.a, row, 0);
  part.b = part_from(whole.b, column, 0);
  if (whole.bias != nullptr) part.bias += column;
  if (whole.sums != nullptr) part.sums += row * whole.stride + column;
  if (whole.out != nullptr) part.out += row * whole.stride + column;
  return part;
}

}  // namespace

bool has_tiles() {
  return supported_loops()[0]->name == std::string_view("amx");
}

bool multiply_by_tiles(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool add,
                       at::Tensor& out) {
  const bool wide = out.scalar_type() == at::kFloat;
  if (panel_loops().multiply == nullptr || (!wide && !has_tiles()) || !is_matrix(a) ||
      !is_matrix(b) || a.size(1) == 0 || out.numel() == 0 || out.stride(1) != 1 ||
      (!wide && (add || out.scalar_type() != at::kBFloat16)) || (wide && bias.defined()))
    return false;
  TORCH_CHECK_VALUE(out.dim() == 2 && a.size(1) == b.size(0) && out.size(0) == a.size(0) &&
                        out.size(1) == b.size(1) &&
                        (!bias.defined() || bias.sizes() == at::IntArrayRef({b.size(1)})),
                    "a product: expected fitting matrices, got ", a.sizes(), " and ", b.sizes(),
                    " for ", out.sizes());
  const at::Tensor wide_bias = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  const TileTask whole{.a = matrix_of(a),
                       .b = matrix_of(b.t()),
                       .rows = out.size(0),
                       .columns = out.size(1),
                       .depth = a.size(1),
                       .bias = bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr,
                       .add = add,
                       .sums = wide ? out.mutable_data_ptr<float>() : nullptr,
                       .out = wide ? nullptr : mutable_bits_of(out),
                       .stride = out.stride(0)};
  const bool by_rows = whole.rows >= whole.columns;
  const int64_t size = by_rows ? whole.rows : whole.columns;
  const int64_t threads = at::get_num_threads();
  const int64_t grain = padded((size + threads - 1) / threads, kPanelWidth);
  at::parallel_for(0, (size + grain - 1) / grain, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * grain, count = std::min(grain, size - first);
      TileTask part = by_rows ? part_of(whole, first, 0) : part_of(whole, 0, first);
      (by_rows ? part.rows : part.columns) = count;
      run_task(part);
    }
  });
  return true;
}

at::Tensor pack_columns(const at::Tensor& weight_MK) {
  const at::Tensor weight = weight_MK.contiguous();
  at::Tensor packed = panel_room(packed_size(weight.size(0), weight.size(1)));
  panel_loops().pack_columns(matrix_of(weight), weight.size(0), weight.size(1),
                             mutable_bits_of(packed));
  return packed;
}

at::Tensor multiply_columns(const at::Tensor& x_NK, const at::Tensor& packed, int64_t columns,
                            const at::Tensor& bias) {
  const at::Tensor x = x_NK.contiguous();
  const int64_t rows = x.size(0), depth = x.size(1);
  const at::Tensor row_panels = panel_room(packed_size(rows, depth));
  panel_loops().pack_rows(matrix_of(x), rows, depth, mutable_bits_of(row_panels));
  const at::Tensor wide_bias = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  at::Tensor out = at::empty({rows, columns}, x.options());
  constexpr int64_t kProductsOfATask = int64_t{1} << 22;
  const int64_t grain = 1 + kProductsOfATask / std::max<int64_t>(1, rows * depth * kPanelWidth);
  const auto multiply_panels = [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanelWidth;
    panel_loops().multiply(
        {.row_panels = bits_of(row_panels),
         .column_panels = bits_of(packed) + begin * packed_size(kPanelWidth, depth),
         .rows = rows,
         .columns = std::min(end * kPanelWidth, columns) - first,
         .depth = depth,
         .bias = bias.defined() ? wide_bias.const_data_ptr<float>() + first : nullptr,
         .out = mutable_bits_of(out) + first,
         .out_stride = columns});
  };
  at::parallel_for(0, (columns + kPanelWidth - 1) / kPanelWidth, grain, multiply_panels);
  return out;
}

}  // namespace cohort::nmt
