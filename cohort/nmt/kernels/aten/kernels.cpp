// SPDX-License-Identifier: Apache-2.0
// Nothing here reads a number back to the host. Of operations whose form in ATen depends on the
// device (at::silu_backward) none is used, so that devices differ in rounding alone.
#include "cohort/nmt/kernels/kernels.h"

#include <cmath>
#include <limits>
#include <torch/types.h>

namespace cohort::nmt {
namespace {

at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

// Of the 64 bits of each element, as an unsigned number's.
at::Tensor shifted_right(const at::Tensor& bits, int64_t by) {
  return at::bitwise_and(at::bitwise_right_shift(bits, by), (int64_t{1} << (64 - by)) - 1);
}

// Whether each element of a tensor like `x` falls: loops.h's rule, with its counters and hash.
at::Tensor falls(const at::Tensor& x, const Dropping& dropping) {
  const auto& [rule, part] = dropping;
  const auto constant = [](uint64_t bits) { return static_cast<int64_t>(bits); };
  at::Tensor number = at::arange(x.numel(), at::TensorOptions(x.device()).dtype(at::kLong));
  if (!part.is_all()) {
    at::Tensor run = at::floor_divide(number, part.size);
    if (part.rows_N.defined()) run = part.rows_N.index_select(0, run);
    number = run * part.whole + at::remainder(number, part.size) + part.first;
  }
  at::Tensor z = at::div(number, 4, "floor") * constant(0x9e3779b97f4a7c15ULL) + constant(rule.key);
  z = at::bitwise_xor(z, shifted_right(z, 30)) * constant(0xbf58476d1ce4e5b9ULL);
  z = at::bitwise_xor(z, shifted_right(z, 27)) * constant(0x94d049bb133111ebULL);
  z = at::bitwise_xor(z, shifted_right(z, 31));
  const at::Tensor random =
      at::bitwise_and(at::bitwise_right_shift(z, at::remainder(number, 4) * 16), 0xffff);
  return at::lt(random, static_cast<int64_t>(rule.threshold)).view(x.sizes());
}

// Wide `values` of a tensor like `x`, dropped and scaled, in x's type.
at::Tensor drop(const at::Tensor& values, const at::Tensor& x, const Dropping& dropping) {
  at::Tensor kept = values * dropping.rule.scale;
  if (dropping.rule.threshold != 0) kept = kept.masked_fill(falls(x, dropping), 0);
  return kept.to(x.scalar_type());
}

at::Tensor aten_dropout(const at::Tensor& x, const Dropping& dropping) {
  return drop(widened(x), x, dropping);
}

at::Tensor aten_add_dropout(const at::Tensor& x, const at::Tensor& y, const Dropping& dropping) {
  return x + aten_dropout(y, dropping);
}

at::Tensor aten_add_dropout_backward(const at::Tensor& grad, at::ScalarType type,
                                     const Dropping& dropping) {
  return aten_dropout(widened(grad), dropping).to(type);
}

at::Tensor aten_relu_dropout(const at::Tensor& x, const Dropping& dropping) {
  const at::Tensor values = widened(x);
  return drop(at::where(values <= 0, 0, values), x, dropping);
}

at::Tensor aten_relu_dropout_backward(const at::Tensor& out, const at::Tensor& grad, float scale) {
  return at::where(out > 0, widened(grad) * scale, 0).to(grad.scalar_type());
}

// The standard normal distribution's share below x. at::gelu takes it by erf, which leaves few
// right digits where it is small.
at::Tensor normal_share(const at::Tensor& x) {
  return at::erfc(x * -M_SQRT1_2) * 0.5;
}

at::Tensor aten_gelu(const at::Tensor& x, const Dropping& dropping) {
  const at::Tensor values = widened(x);
  return drop(values * normal_share(values), x, dropping);
}

at::Tensor aten_gelu_backward(const at::Tensor& x, const at::Tensor& grad,
                              const Dropping& dropping) {
  const at::Tensor values = widened(x);
  const at::Tensor density = at::exp(values * values * -0.5) * (M_SQRT1_2 * 0.5 * M_2_SQRTPI);
  return drop((normal_share(values) + values * density) * widened(grad), x, dropping);
}

at::Tensor aten_swish(const at::Tensor& x, const Dropping& dropping) {
  return drop(at::silu(widened(x)), x, dropping);
}

at::Tensor aten_swish_backward(const at::Tensor& x, const at::Tensor& grad,
                               const Dropping& dropping) {
  const at::Tensor values = widened(x);
  const at::Tensor share = at::sigmoid(values);
  return drop(share * (1 + values * (1 - share)) * widened(grad), x, dropping);
}

std::pair<at::Tensor, at::Tensor> aten_softmax(const at::Tensor& scores, const SoftmaxMask& mask,
                                               const Dropping& dropping) {
  const int64_t queries = scores.size(2), keys = scores.size(3);
  const at::Tensor key = at::arange(keys, mask.key_lengths_B.options());
  at::Tensor hidden = key >= mask.key_lengths_B.view({-1, 1, 1, 1});
  if (mask.causal) {
    const at::Tensor query = at::arange(queries, mask.key_lengths_B.options());
    hidden = at::logical_or(hidden, key > query.view({-1, 1}));
  }
  const at::Tensor visible =
      widened(scores).masked_fill(hidden, -std::numeric_limits<double>::infinity());
  const at::Tensor probs = at::softmax(visible * mask.scale, -1).to(scores.scalar_type());
  if (dropping.rule.threshold == 0) return {probs, at::Tensor()};
  return {probs, aten_dropout(probs, dropping)};
}

at::Tensor aten_softmax_backward(const at::Tensor& probs, const at::Tensor& grad,
                                 const SoftmaxMask& mask, const Dropping& dropping) {
  const at::Tensor p = widened(probs);
  const at::Tensor g = widened(dropping.rule.threshold == 0 ? grad : aten_dropout(grad, dropping));
  const at::Tensor dot = (p * g).sum(-1, /*keepdim=*/true);
  return (p * (g - dot) * mask.scale).to(probs.scalar_type());
}

void aten_product(const at::Tensor& a, const at::Tensor& b, const ProductOptions& options,
                  at::Tensor& out) {
  const bool same = out.scalar_type() == a.scalar_type();
  if (options.bias_M.defined()) {
    at::addmm_out(out, options.bias_M, a, b);
  } else if (options.add) {
    same ? out.addmm_(a, b) : out.add_(at::mm(a, b));
  } else {
    same ? at::mm_out(out, a, b) : out.copy_(at::mm(a, b));
  }
}

void aten_cross_entropy(const at::Tensor& logits, const at::Tensor& labels, double smoothing,
                        bool with_gradient, const at::Tensor& sums) {
  const at::Tensor scores = widened(logits);
  const at::Tensor label = labels.unsqueeze(1);
  const double uniform = smoothing / static_cast<double>(logits.size(1));
  const at::Tensor log_norm = at::logsumexp(scores, 1).to(at::kDouble);
  const at::Tensor nll = log_norm - scores.gather(1, label).squeeze(1);
  const at::Tensor mean_nll = log_norm * smoothing - scores.sum(1) * uniform;
  sums.select(0, 0).add_((nll * (1 - smoothing) + mean_nll).sum());
  sums.select(0, 1).add_(nll.sum());
  if (!with_gradient) return;
  const at::Tensor slope = at::softmax(scores, 1).sub_(uniform);
  const at::Tensor of_label = at::full_like(label, smoothing - 1, slope.options());
  logits.copy_(slope.scatter_add(1, label, of_label));
}

}  // namespace

extern const Kernels kAtenKernels;
const Kernels kAtenKernels = {.dropout = aten_dropout,
                              .add_dropout = aten_add_dropout,
                              .add_dropout_backward = aten_add_dropout_backward,
                              .relu_dropout = aten_relu_dropout,
                              .relu_dropout_backward = aten_relu_dropout_backward,
                              .gelu = {aten_gelu, aten_gelu_backward},
                              .swish = {aten_swish, aten_swish_backward},
                              .softmax = aten_softmax,
                              .softmax_backward = aten_softmax_backward,
                              .product = aten_product,
                              .cross_entropy = aten_cross_entropy};

}  // namespace cohort::nmt
