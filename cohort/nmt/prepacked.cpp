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

// With AVX-512 oneDNN's products of at least so many rows sum every row in one order; those of
// fewer may have other kernels. Otherwise the order changes with the number of rows: there all
// products are of kBlockRows rows, which costs time where rows are many. A multiple of the 6 rows of
// its AVX2 kernels: in a block of 32 the last two are summed in another order.
constexpr int64_t kFewestRows = 16;
constexpr int64_t kBlockRows = 24;

bool has_avx512(const Loops& table) {
  return std::string_view(table.name) == "avx512";
}

// In float32 oneDNN lets several threads share the sums of wide rows where there are few rows.
bool sums_in_one_order(at::ScalarType type, int64_t width) {
  constexpr int64_t kWidestWhole = 1024;
  return has_avx512(loops()) &&
         (type != at::kFloat || width <= kWidestWhole || at::get_num_threads() == 1);
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

Prepacked::Prepacked(const at::Tensor& weight) : weight_(weight) {
  const auto type = weight.scalar_type();
  packed_ = at::globalContext().hasMKLDNN() && at::globalContext().userEnabledMkldnn() &&
            weight.device().is_cpu() &&
            (type == at::kFloat || (type == at::kBFloat16 && has_avx512(*supported_loops()[0])));
  if (packed_) {
    const std::optional<c10::SymInt> any_rows;
    weight_ = onednn<Reorder>("mkldnn::_reorder_linear_weight")
                  .call(weight.detach().contiguous(), any_rows);
  }
}

at::Tensor Prepacked::product(const at::Tensor& x, const at::Tensor& bias) const {
  if (!packed_) return at::linear(x, weight_, optional(bias));
  return onednn<Linear>("mkldnn::_linear_pointwise")
      .call(x, weight_, optional(bias), "none", c10::List<std::optional<at::Scalar>>(),
            std::nullopt);
}

at::Tensor Prepacked::multiply(const at::Tensor& x, const at::Tensor& bias) const {
  const bool alike = packed_ && sums_in_one_order(x.scalar_type(), x.size(-1));
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  auto shape = x.sizes().vec();
  shape.back() = -1;
  if ((alike && rows.size(0) >= kFewestRows) || x.scalar_type() == at::kDouble)
    return product(rows, bias).view(shape);
  // Products of one size are of one kernel.
  const int64_t size = alike ? kFewestRows : kBlockRows;
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
