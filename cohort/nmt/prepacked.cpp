// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/prepacked.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <algorithm>
#include <optional>
#include <string_view>
#include <torch/types.h>
#include <vector>

#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/kernels/cpu/tile_product.h"

namespace cohort::nmt {
namespace {

// libtorch has these for compiled models and gives them no C++ name.
using Reorder = at::Tensor(const at::Tensor& weight, std::optional<c10::SymInt> rows);
using Linear = at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, std::string_view activation,
                          c10::List<std::optional<at::Scalar>> arguments,
                          std::optional<std::string_view> algorithm);

template <class Signature>
const c10::TypedOperatorHandle<Signature>& onednn(const char* name) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
  return handle;
}

// oneDNN's products in bfloat16 without AMX of at least so many rows sum every row in one order; those of fewer may have other
// kernels. Where the weight is not rearranged, the order may change with the number of rows: there all products are of
// kBlockRows rows, which costs time.
constexpr int64_t kFewestRows = 16;
constexpr int64_t kBlockRows = 24;

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// [out, in] as [blocks of outputs, in, kPackedColumns].
at::Tensor in_blocks(const at::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1);
  const int64_t blocks = (out + kPackedColumns - 1) / kPackedColumns;
  const at::Tensor padded = at::zeros({blocks * kPackedColumns, in}, weight.options());
  padded.narrow(0, 0, out).copy_(weight);
  return padded.view({blocks, kPackedColumns, in}).transpose(1, 2).contiguous();
}

}  // namespace

Prepacked::Prepacked(const at::Tensor& weight)
    : weight_(weight), options_(weight.options()), in_(weight.size(1)), out_(weight.size(0)) {
  const auto type = weight.scalar_type();
  const bool has_onednn =
      at::globalContext().hasMKLDNN() && at::globalContext().userEnabledMkldnn();
  if (!weight.device().is_cpu()) return;
  if (type == at::kFloat) {
    form_ = Form::kBlocks;
    weight_ = in_blocks(weight.detach());
  } else if (type == at::kBFloat16 && has_tiles()) {
    form_ = Form::kTiles;
    weight_ = pack_columns(weight.detach());
  } else if (type == at::kBFloat16 && has_onednn &&
             std::string_view(supported_loops()[0]->name).starts_with("avx512")) {
    form_ = Form::kOneDnn;
    const std::optional<c10::SymInt> any_rows;
    weight_ = onednn<Reorder>("mkldnn::_reorder_linear_weight")
                  .call(weight.detach().contiguous(), any_rows);
  }
}

at::Tensor Prepacked::product(const at::Tensor& x, const at::Tensor& bias) const {
  if (form_ == Form::kGiven) return at::linear(x, weight_, optional(bias));
  return onednn<Linear>("mkldnn::_linear_pointwise")
      .call(x, weight_, optional(bias), "none", c10::List<std::optional<at::Scalar>>(),
            std::nullopt);
}

at::Tensor Prepacked::product_of_blocks(const at::Tensor& x, const at::Tensor& bias) const {
  const int64_t in = in_;
  const at::Tensor rows = x.contiguous();
  const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
  at::Tensor out = at::empty({rows.size(0), out_}, at::kFloat);
  const auto multiply_blocks = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kPackedColumns;
      loops().packed_product(
          {.x = rows.const_data_ptr<float>(),
           .rows = rows.size(0),
           .depth = in,
           .block = weight_.const_data_ptr<float>() + first * in,
           .bias = added.defined() ? added.const_data_ptr<float>() + first : nullptr,
           .columns = std::min(kPackedColumns, out_ - first),
           .out = out.mutable_data_ptr<float>() + first,
           .out_stride = out_});
    }
  };
  constexpr int64_t kProductsOfATask = int64_t{1} << 20;
  at::parallel_for(0, weight_.size(0),
                   1 + kProductsOfATask / std::max<int64_t>(1, rows.numel() * kPackedColumns),
                   multiply_blocks);
  return out;
}

void Prepacked::check(const at::Tensor& x, const at::Tensor& bias) const {
  const auto fits = [&](const at::Tensor& t) {
    return t.scalar_type() == options_.dtype().toScalarType() && t.device() == options_.device();
  };
  TORCH_CHECK_VALUE(fits(x) && x.dim() > 0 && x.size(-1) == in_, "a product: expected rows of ",
                    in_, " ", options_.dtype(), " on ", options_.device(), ", got ", x.toString(),
                    " ", x.sizes(), " on ", x.device());
  TORCH_CHECK_VALUE(!bias.defined() || (fits(bias) && bias.sizes() == at::IntArrayRef({out_})),
                    "a product: expected a bias of ", out_, " ", options_.dtype(), " on ",
                    options_.device(), ", got ", bias.defined() ? bias.toString() : "none", " ",
                    bias.defined() ? bias.sizes() : at::IntArrayRef());
}

at::Tensor Prepacked::multiply(const at::Tensor& x, const at::Tensor& bias) const {
  check(x, bias);
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  auto shape = x.sizes().vec();
  shape.back() = out_;
  if (rows.size(0) == 0) return at::empty(shape, x.options());
  if (form_ == Form::kBlocks) return product_of_blocks(rows, bias).view(shape);
  if (form_ == Form::kTiles) return multiply_columns(rows, weight_, out_, bias).view(shape);
  if ((form_ == Form::kOneDnn && rows.size(0) >= kFewestRows) || x.scalar_type() == at::kDouble)
    return product(rows, bias).view(shape);
  // Products of one size are of one kernel.
  const int64_t size = form_ == Form::kOneDnn ? kFewestRows : kBlockRows;
  std::vector<at::Tensor> blocks;
  for (int64_t first = 0; first < rows.size(0); first += size) {
    const int64_t count = std::min(size, rows.size(0) - first);
    at::Tensor block = rows.narrow(0, first, count);
    if (count < size) block = at::constant_pad_nd(block, {0, 0, 0, size - count});
    blocks.push_back(product(block, bias).narrow(0, 0, count));
  }
  return (blocks.size() == 1 ? blocks.front() : at::cat(blocks)).view(shape);
}

}  // namespace cohort::nmt
