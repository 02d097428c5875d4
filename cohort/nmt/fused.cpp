// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/fused.h"

#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <c10/util/accumulate.h>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <vector>

#include "cohort/nmt/kernels/cpu/for_type.h"
#include "cohort/nmt/kernels/kernels.h"
#include "cohort/optim/gradient_memory.h"

namespace cohort::nmt {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the next call on `stream` drops of `numel` elements.
Dropping next_dropping(int64_t numel, double p, DropoutStream& stream, const DropoutPart& part) {
  if (p == 0 || numel == 0) return {};
  TORCH_CHECK_VALUE(p >= 0 && p < 1, "dropout: expected a probability in [0, 1), got ", p);
  TORCH_CHECK_VALUE(part.size > 0 && numel % part.size == 0 && part.first >= 0 &&
                        part.first + part.size <= part.whole,
                    "dropout: ", numel, " elements are no parts of ", part.size, " from ",
                    part.first, " on of ", part.whole);
  TORCH_CHECK_VALUE(
      !part.rows_N.defined() || (part.rows_N.dtype() == at::kLong && part.rows_N.is_contiguous() &&
                                 part.rows_N.numel() * part.size == numel),
      "dropout: expected ", numel / part.size, " int64 rows, got ", part.rows_N.toString(), " ",
      part.rows_N.sizes());
  DropoutRule rule;
  rule.threshold = static_cast<uint16_t>(std::min<long>(std::lround(p * 65536), 65535));
  rule.scale = 65536.0F / static_cast<float>(65536 - rule.threshold);
  rule.key = splitmix64_finalizer(splitmix64_finalizer(stream.seed + 0x9e3779b97f4a7c15ULL) +
                                  ++stream.call);
  return {rule, part};
}

// Crosses to backward as numbers, as the mask does but for its lengths.
void save(AutogradContext* context, const Dropping& dropping) {
  const auto& [rule, part] = dropping;
  context->saved_data["key"] = static_cast<int64_t>(rule.key);
  context->saved_data["threshold"] = static_cast<int64_t>(rule.threshold);
  context->saved_data["scale"] = static_cast<double>(rule.scale);
  context->saved_data["part"] = std::vector<int64_t>{part.size, part.whole, part.first};
  context->saved_data["rows"] = part.rows_N;
}

Dropping saved_dropping(AutogradContext* context) {
  const std::vector<int64_t> part = context->saved_data["part"].toIntVector();
  return {.rule = {.key = static_cast<uint64_t>(context->saved_data["key"].toInt()),
                   .threshold = static_cast<uint16_t>(context->saved_data["threshold"].toInt()),
                   .scale = static_cast<float>(context->saved_data["scale"].toDouble())},
          .part = {.size = part[0],
                   .whole = part[1],
                   .first = part[2],
                   .rows_N = context->saved_data["rows"].toTensor()}};
}

// The parts of the tensor's name are put together only for the message: each step of decoding asks.
template <class... Parts>
void check_device(const at::Tensor& tensor, const at::Tensor& beside, const Parts&... name) {
  TORCH_CHECK_VALUE(tensor.device() == beside.device(), name..., ": expected a tensor on ",
                    beside.device(), ", got one on ", tensor.device());
}

// The gradients' own graph would lack what forward has computed.
void refuse_second_derivative() {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                              "operations of cohort/nmt have no second derivative: expected "
                              "backward without create_graph");
}

struct Dropout : torch::autograd::Function<Dropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const Dropping& dropping) {
    save(context, dropping);
    return kernels_for(x).dropout(x.contiguous(), dropping);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor grad = grads[0].contiguous();
    return {kernels_for(grad).dropout(grad, saved_dropping(context)), at::Tensor()};
  }
};

struct AddDropout : torch::autograd::Function<AddDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y,
                            const Dropping& dropping) {
    save(context, dropping);
    context->saved_data["type"] = y.scalar_type();
    return kernels_for(x).add_dropout(x.contiguous(), y.contiguous(), dropping);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor grad = grads[0].contiguous();
    variable_list results{grad, at::Tensor(), at::Tensor()};
    if (context->needs_input_grad(1)) {
      results[1] = kernels_for(grad).add_dropout_backward(
          grad, context->saved_data["type"].toScalarType(), saved_dropping(context));
    }
    return results;
  }
};

// Returns {sum, normed}; without y the sum is x.
struct AddDropoutNorm : torch::autograd::Function<AddDropoutNorm> {
  static NormKernels::Result compute(const at::Tensor& x, const std::optional<at::Tensor>& y,
                                     const NormParameters& norm, const Dropping& dropping) {
    return kernels_for(x).norm.forward(
        x.contiguous(), y ? y->contiguous() : at::Tensor(),
        {norm.weight_D.contiguous(), norm.bias_D.contiguous(), norm.type}, dropping);
  }
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const std::optional<at::Tensor>& y, const at::Tensor& weight,
                               const at::Tensor& bias, at::ScalarType type,
                               const Dropping& dropping) {
    const auto result = compute(x, y, {weight, bias, type}, dropping);
    save(context, dropping);
    if (y) context->saved_data["type_of_y"] = y->scalar_type();
    context->save_for_backward({result.sum, weight, result.stats});
    context->set_materialize_grads(false);
    return {y ? result.sum : x, result.normed};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const auto of_y = context->saved_data.find("type_of_y");
    // Of the gradient that y takes. Without y the weight's edge has this number.
    const auto type_of_y = of_y == context->saved_data.end() || !context->needs_input_grad(1)
                               ? std::nullopt
                               : std::optional(of_y->second.toScalarType());
    if (!grads[1].defined()) {  // Of the sum alone.
      variable_list results(6);
      if (!grads[0].defined()) return results;
      results[0] = grads[0];
      if (type_of_y) {
        const at::Tensor grad = grads[0].contiguous();
        results[1] =
            kernels_for(grad).add_dropout_backward(grad, *type_of_y, saved_dropping(context));
      }
      return results;
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &sum = saved[0], &weight = saved[1], &stats = saved[2];
    const auto result = kernels_for(sum).norm.backward(
        sum, stats, weight.contiguous(), grads[0].defined() ? grads[0].contiguous() : grads[0],
        grads[1].contiguous(), type_of_y, saved_dropping(context));
    return {result.x, result.y, result.weight, result.bias, at::Tensor(), at::Tensor()};
  }
};

struct ReluDropout : torch::autograd::Function<ReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const Dropping& dropping) {
    const at::Tensor out = kernels_for(x).relu_dropout(x.contiguous(), dropping);
    save(context, dropping);
    context->save_for_backward({out});
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor out = context->get_saved_variables()[0];
    const float scale = saved_dropping(context).rule.scale;
    return {kernels_for(out).relu_dropout_backward(out, grads[0].contiguous(), scale),
            at::Tensor()};
  }
};

template <ActivationKernels Kernels::*kActivation>
struct ActivationDropout : torch::autograd::Function<ActivationDropout<kActivation>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const Dropping& dropping) {
    const at::Tensor in = x.contiguous();
    save(context, dropping);
    context->save_for_backward({in});
    return (kernels_for(in).*kActivation).forward(in, dropping);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor in = context->get_saved_variables()[0];
    return {
        (kernels_for(in).*kActivation).backward(in, grads[0].contiguous(), saved_dropping(context)),
        at::Tensor()};
  }
};

void save(AutogradContext* context, const SoftmaxMask& mask) {
  context->saved_data["causal"] = mask.causal;
  context->saved_data["softmax_scale"] = static_cast<double>(mask.scale);
}

SoftmaxMask saved_mask(AutogradContext* context, const at::Tensor& key_lengths_B) {
  return {.key_lengths_B = key_lengths_B,
          .causal = context->saved_data["causal"].toBool(),
          .scale = static_cast<float>(context->saved_data["softmax_scale"].toDouble())};
}

struct MaskedSoftmax : torch::autograd::Function<MaskedSoftmax> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            const SoftmaxMask& mask, const Dropping& dropping) {
    const auto [probs, dropped] = kernels_for(scores).softmax(scores, mask, dropping);
    save(context, dropping);
    save(context, mask);
    context->save_for_backward({probs, mask.key_lengths_B});
    return dropped.defined() ? dropped : probs;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    return {kernels_for(saved[0]).softmax_backward(saved[0], grads[0].contiguous(),
                                                   saved_mask(context, saved[1]),
                                                   saved_dropping(context)),
            at::Tensor(), at::Tensor()};
  }
};

// Writes the gradient that these rows give the weight to `total`; if `has_earlier`, adds it to what is there.
void weight_gradient(const at::Tensor& grad_NM, const at::Tensor& x_NK, at::Tensor& total,
                     bool has_earlier = false) {
  RECORD_USER_SCOPE_WITH_INPUTS("weight_gradient", (std::vector<c10::IValue>{grad_NM, x_NK}));
  kernels_for(grad_NM).product(grad_NM.t(), x_NK, {.add = has_earlier}, total);
}

// out = a b (+ bias, in each row)
void multiply(const at::Tensor& a, const at::Tensor& b, at::Tensor& out,
              const at::Tensor& bias_M = {}) {
  RECORD_USER_SCOPE_WITH_INPUTS("product", (std::vector<c10::IValue>{a, b, bias_M}));
  kernels_for(a).product(a, b, {.bias_M = bias_M}, out);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias_M = {}) {
  at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  multiply(a, b, out, bias_M);
  return out;
}

// Backward gets the leaf's address as a number, only to compare it. Saving the leaf itself would
// forbid writing to it before backward.
void save_identity(AutogradContext* context, const at::Tensor& weight) {
  const auto* leaf = weight.is_leaf() ? weight.unsafeGetTensorImpl() : nullptr;
  context->saved_data["parameter"] = static_cast<int64_t>(reinterpret_cast<intptr_t>(leaf));
}

// Memory for the gradient of the weight that was saved so, if somebody offers some.
at::Tensor take_gradient_memory(AutogradContext* context, at::IntArrayRef sizes,
                                at::ScalarType type) {
  const auto leaf = static_cast<intptr_t>(context->saved_data["parameter"].toInt());
  return optim::take_gradient_memory(reinterpret_cast<const at::TensorImpl*>(leaf), sizes, type);
}

// The same, or memory of its own if nobody offers any.
at::Tensor gradient_memory(AutogradContext* context, at::IntArrayRef sizes,
                           const at::TensorOptions& options) {
  const at::Tensor memory =
      take_gradient_memory(context, sizes, c10::typeMetaToScalarType(options.dtype()));
  return memory.defined() ? memory : at::empty(sizes, options);
}

// What a product of linear() keeps for its gradients, and those.
void save_operands(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
  save_identity(context, weight);
  context->saved_data["x"] = x.sizes();
  context->saved_data["types"] = std::vector<int64_t>{static_cast<int64_t>(x.scalar_type()),
                                                      static_cast<int64_t>(weight.scalar_type())};
}

variable_list operand_gradients(AutogradContext* context, const at::Tensor& grad,
                                const at::Tensor& rows, const at::Tensor& w) {
  const std::vector<int64_t> types = context->saved_data["types"].toIntVector();
  variable_list results(2);
  if (context->needs_input_grad(0)) {
    results[0] = product(grad, w)
                     .view(context->saved_data["x"].toIntVector())
                     .to(static_cast<at::ScalarType>(types[0]));
  }
  if (context->needs_input_grad(1)) {
    const auto type = static_cast<at::ScalarType>(types[1]);
    results[1] = gradient_memory(context, w.sizes(), w.options().dtype(type));
    weight_gradient(grad, rows, results[1]);
  }
  return results;
}

// Rows [N, M] for those of x [..., K].
at::Tensor as_rows_of(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  return y.view(sizes);
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType type) {
    const at::Tensor rows = x.to(type).reshape({-1, x.size(-1)}), w = weight.to(type);
    const at::Tensor y = product(rows, w.t(), bias ? bias->to(type) : at::Tensor());
    context->save_for_backward({rows, w});
    save_operands(context, x, weight);
    if (bias) context->saved_data["bias"] = bias->scalar_type();
    return as_rows_of(y, x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &w = saved[1];
    const at::Tensor grad = grads[0].reshape({-1, w.size(0)});
    variable_list results = operand_gradients(context, grad, rows, w);
    results.resize(4);
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end() && context->needs_input_grad(2))
      results[2] = grad.sum(0, /*keepdim=*/false, bias->second.toScalarType());
    return results;
  }
};

struct LinearReluDropout : torch::autograd::Function<LinearReluDropout> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, at::ScalarType type, const Dropping& dropping) {
    const at::Tensor rows = x.to(type).reshape({-1, x.size(-1)}), w = weight.to(type);
    const at::Tensor out = product(rows, w.t());
    kernels_for(x).bias_relu_dropout.forward(out, bias.contiguous(), dropping);
    context->save_for_backward({rows, w, out});
    save_operands(context, x, weight);
    save(context, dropping);
    return as_rows_of(out, x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &w = saved[1], &out = saved[2];
    const auto [grad, grad_bias] = kernels_for(out).bias_relu_dropout.backward(
        out, grads[0].reshape(out.sizes()).contiguous(), saved_dropping(context).rule.scale);
    variable_list results = operand_gradients(context, grad, rows, w);
    results.insert(results.end(), {grad_bias, at::Tensor(), at::Tensor()});
    return results;
  }
};

// Operands where projections have left them, or gradients to be written there: without `kv`, x is queries, keys and values.
AttentionOperands operands_of(const at::Tensor& x, const at::Tensor& kv, int64_t heads,
                              const PackedSentences& packed) {
  const int64_t width = kv.defined() ? x.size(-1) : x.size(-1) / 3;
  const at::Tensor& rows = kv.defined() ? kv : x;
  const int64_t keys = rows.size(-1) - 2 * width;
  return {.q_BQD = x.narrow(-1, 0, width),
          .k_BKD = rows.narrow(-1, keys, width),
          .v_BKD = rows.narrow(-1, keys + width, width),
          .heads = heads,
          .packed = packed};
}

// Of operands as `operands_of` takes them, contiguous.
struct FusedAttention : torch::autograd::Function<FusedAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& of_keys, int64_t heads,
                            const PackedSentences& packed, const SoftmaxMask& mask,
                            const Dropping& dropping) {
    RECORD_USER_SCOPE("attention");
    const at::Tensor kv = of_keys.value_or(at::Tensor());
    const auto [out, stats] =
        kernels_for(x).attention.forward(operands_of(x, kv, heads, packed), mask, dropping);
    save(context, dropping);
    save(context, mask);
    context->saved_data["heads"] = heads;
    context->saved_data["longest"] = std::vector<int64_t>{packed.queries, packed.keys};
    context->save_for_backward({x, kv, mask.key_lengths_B, out, stats, packed.query_lengths_B});
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &kv = saved[1];
    const int64_t heads = context->saved_data["heads"].toInt();
    const std::vector<int64_t> longest = context->saved_data["longest"].toIntVector();
    const PackedSentences packed{saved[5], longest[0], longest[1]};
    const at::Tensor grad_x = at::empty_like(x);
    const at::Tensor grad_kv = kv.defined() ? at::empty_like(kv) : at::Tensor();
    kernels_for(x).attention.backward(operands_of(x, kv, heads, packed), saved[3], saved[4],
                                      grads[0].contiguous(), saved_mask(context, saved[2]),
                                      saved_dropping(context),
                                      operands_of(grad_x, grad_kv, heads, packed));
    return {grad_x, grad_kv, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& ids) {
    save_identity(context, table);
    context->saved_data["type"] = table.scalar_type();
    context->saved_data["rows"] = table.size(0);
    context->save_for_backward({ids});
    return at::embedding(table, ids);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor ids = context->get_saved_variables()[0];
    const int64_t rows = context->saved_data["rows"].toInt(), width = grads[0].size(-1);
    const at::Tensor memory =
        take_gradient_memory(context, {rows, width}, context->saved_data["type"].toScalarType());
    if (!memory.defined()) {
      return {at::embedding_dense_backward(grads[0], ids, rows, /*padding_idx=*/-1,
                                           /*scale_grad_by_freq=*/false),
              at::Tensor()};
    }
    memory.zero_().index_add_(0, ids.reshape(-1), grads[0].reshape({-1, width}));
    return {memory, at::Tensor()};
  }
};

// x times a scalar tensor, which is not read back from its device; into `memory`, if it is defined.
// May write into x.
at::Tensor scaled(const at::Tensor& x, const at::Tensor& factor, at::Tensor memory = {}) {
  if (!factor.is_cpu()) return (x.to(factor.scalar_type()) * factor).to(x.scalar_type());
  const double value = factor.item<double>();
  if (memory.defined()) return at::mul_out(memory, x, at::native::wrapped_scalar_tensor(value));
  return value == 1 ? x : x.mul_(value);
}

constexpr int64_t kChunkRows = 1024;

// Returns {loss, nll}; leaves gradients for a loss weight of 1 in the context. Of one chunk those of
// the logits alone: backward makes the others, the weight's where it is wanted.
struct SmoothedCrossEntropy : torch::autograd::Function<SmoothedCrossEntropy> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const at::Tensor& labels, double smoothing,
                               bool with_gradient) {
    RECORD_USER_SCOPE("loss");
    const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor w = weight.to(hidden.scalar_type());
    const int64_t rows = hidden.size(0);
    const at::Tensor sums = at::zeros({2}, at::TensorOptions(hidden.device()).dtype(at::kDouble));
    // Of rows h, which begin at `first`: the logits, or with_gradient their gradients.
    const auto logits_of = [&](const at::Tensor& h, int64_t first) {
      at::Tensor logits = product(h, w.t());
      kernels_for(logits).cross_entropy(logits, labels.narrow(0, first, h.size(0)), smoothing,
                                        with_gradient, sums);
      return logits;
    };
    if (with_gradient && rows > 0 && rows <= kChunkRows) {
      context->save_for_backward({logits_of(hidden, 0), hidden, w});
    } else {
      at::Tensor grad_hidden, grad_weight;
      if (with_gradient) {
        grad_hidden = at::empty_like(hidden);
        const at::TensorOptions options = w.options().dtype(wide);
        grad_weight = rows > 0 ? at::empty(w.sizes(), options) : at::zeros(w.sizes(), options);
      }
      for (int64_t first = 0; first < rows; first += kChunkRows) {
        const int64_t count = std::min(kChunkRows, rows - first);
        const at::Tensor h = hidden.narrow(0, first, count), logits = logits_of(h, first);
        if (!with_gradient) continue;
        at::Tensor grad_h = grad_hidden.narrow(0, first, count);
        multiply(logits, w, grad_h);
        weight_gradient(logits, h, grad_weight, /*has_earlier=*/first > 0);
      }
      context->saved_data["grad_hidden"] = grad_hidden;
      context->saved_data["grad_weight"] = grad_weight;
    }
    context->saved_data["wide"] = wide;
    save_identity(context, weight);
    at::Tensor loss = sums.select(0, 0).to(wide, /*non_blocking=*/false, /*copy=*/true);
    at::Tensor nll = sums.select(0, 1).clone();
    context->mark_non_differentiable({nll});
    return {loss, nll};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    // The gradients are scaled in place and given away.
    TORCH_CHECK(context->saved_data.count("wide") != 0,
                "smoothed_cross_entropy: expected one backward, but its gradients were given away "
                "in the first (retain_graph does not keep them)");
    const variable_list results = context->saved_data.count("grad_weight") != 0
                                      ? of_chunks(context, grads[0])
                                      : of_one_chunk(context, grads[0]);
    context->saved_data.clear();
    return {results[0], results[1], at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static variable_list of_chunks(AutogradContext* context, const at::Tensor& factor) {
    const at::Tensor grad_hidden = context->saved_data["grad_hidden"].toTensor();
    const at::Tensor grad_weight = context->saved_data["grad_weight"].toTensor();
    variable_list results{scaled(grad_hidden, factor), at::Tensor()};
    if (context->needs_input_grad(1)) {
      results[1] =
          scaled(grad_weight, factor,
                 take_gradient_memory(context, grad_weight.sizes(), grad_weight.scalar_type()));
    }
    return results;
  }
  static variable_list of_one_chunk(AutogradContext* context, const at::Tensor& factor) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &hidden = saved[1], &w = saved[2];
    const at::ScalarType wide = context->saved_data["wide"].toScalarType();
    variable_list results{scaled(product(logits, w), factor), at::Tensor()};
    if (!context->needs_input_grad(1)) return results;
    at::Tensor grad_weight = gradient_memory(context, w.sizes(), w.options().dtype(wide));
    // Few rows are scaled faster than the whole weight; in a half type that would round them.
    const bool scales_rows = hidden.scalar_type() == wide;
    weight_gradient(logits, scales_rows ? hidden * factor : hidden, grad_weight);
    results[1] = scales_rows ? grad_weight : scaled(grad_weight, factor);
    return results;
  }
};

}  // namespace

uint64_t splitmix64_finalizer(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
  return bits ^ (bits >> 31);
}

at::Tensor dropout(const at::Tensor& x, double p, DropoutStream& stream, const DropoutPart& part) {
  if (p == 0) return x;
  return Dropout::apply(x, next_dropping(x.numel(), p, stream, part));
}

namespace {

void check_added(const char* name, const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK_VALUE(x.sizes() == y.sizes() &&
                        at::promote_types(x.scalar_type(), y.scalar_type()) == x.scalar_type(),
                    name,
                    ": expected two tensors of a shape, the second of the first's type or a "
                    "narrower one, got ",
                    x.dtype(), " ", x.sizes(), " and ", y.dtype(), " ", y.sizes());
  check_device(y, x, name, ": y");
}

void check_whole_rows(const char* name, const DropoutPart& part, int64_t width, double p) {
  TORCH_CHECK_VALUE(p == 0 || part.is_all() || (width > 0 && part.size % width == 0), name,
                    ": expected a part of whole rows of ", width, " elements, got ", part.size);
}

// Of x, to which y is added, if it is defined.
NormedSum norm_of(const char* name, const at::Tensor& x, const at::Tensor& y,
                  const NormParameters& norm, double p, DropoutStream& stream,
                  const DropoutPart& part) {
  const auto& [weight, bias, type] = norm;
  TORCH_CHECK_VALUE(x.dim() > 0 && weight.sizes() == x.sizes().slice(x.dim() - 1) &&
                        bias.sizes() == weight.sizes(),
                    name, ": expected [..., D] and a norm's weight and bias [D], got ", x.sizes(),
                    ", ", weight.sizes(), " and ", bias.sizes());
  check_device(weight, x, name, ": weight");
  check_device(bias, x, name, ": bias");
  const NormKernels& fused = kernels_for(x).norm;
  if (fused.forward != nullptr && fused.takes(x, y, norm)) {
    const Dropping dropping = y.defined() ? next_dropping(y.numel(), p, stream, part) : Dropping();
    const std::optional<at::Tensor> added = y.defined() ? std::optional(y) : std::nullopt;
    if (!at::GradMode::is_enabled()) {  // What a graph costs shows in a step of decoding.
      const auto result = AddDropoutNorm::compute(x, added, norm, dropping);
      return {result.sum, result.normed};
    }
    const variable_list results = AddDropoutNorm::apply(x, added, weight, bias, type, dropping);
    return {results[0], results[1]};
  }
  const at::Tensor sum = y.defined() ? add_dropout(x, y, p, stream, part) : x;
  return {sum, at::layer_norm(sum, weight.sizes(), weight, bias, kNormEpsilon).to(type)};
}

}  // namespace

at::Tensor add_dropout(const at::Tensor& x, const at::Tensor& y, double p, DropoutStream& stream,
                       const DropoutPart& part) {
  check_added("add_dropout", x, y);
  if (p == 0) return x + y;
  return AddDropout::apply(x, y, next_dropping(y.numel(), p, stream, part));
}

NormedSum add_dropout_norm(const at::Tensor& x, const at::Tensor& y, const NormParameters& norm,
                           double p, DropoutStream& stream, const DropoutPart& part) {
  check_added("add_dropout_norm", x, y);
  check_whole_rows("add_dropout_norm", part, x.size(-1), p);
  return norm_of("add_dropout_norm", x, y, norm, p, stream, part);
}

NormedSum layer_norm(const at::Tensor& x, const NormParameters& norm) {
  DropoutStream none;
  return norm_of("layer_norm", x, {}, norm, 0, none, {});
}

at::Tensor relu_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                        const DropoutPart& part) {
  return ReluDropout::apply(x, next_dropping(x.numel(), p, stream, part));
}

at::Tensor gelu_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                        const DropoutPart& part) {
  return ActivationDropout<&Kernels::gelu>::apply(x, next_dropping(x.numel(), p, stream, part));
}

at::Tensor swish_dropout(const at::Tensor& x, double p, DropoutStream& stream,
                         const DropoutPart& part) {
  return ActivationDropout<&Kernels::swish>::apply(x, next_dropping(x.numel(), p, stream, part));
}

at::Tensor masked_softmax(const at::Tensor& scores_BHQK, const at::Tensor& key_lengths_B,
                          bool causal, double scale, double p, DropoutStream& stream,
                          const DropoutPart& part) {
  TORCH_CHECK_VALUE(scores_BHQK.dim() == 4 && scores_BHQK.is_contiguous() &&
                        key_lengths_B.dtype() == at::kLong && key_lengths_B.dim() == 1 &&
                        key_lengths_B.size(0) == scores_BHQK.size(0) &&
                        key_lengths_B.is_contiguous(),
                    "masked_softmax: expected contiguous scores [B, H, Q, K] and int64 lengths "
                    "[B], got ",
                    scores_BHQK.sizes(), " and ", key_lengths_B.sizes());
  check_device(key_lengths_B, scores_BHQK, "masked_softmax: lengths");
  check_range("masked_softmax: lengths", key_lengths_B, 1, scores_BHQK.size(3));
  return MaskedSoftmax::apply(
      scores_BHQK,
      SoftmaxMask{
          .key_lengths_B = key_lengths_B, .causal = causal, .scale = static_cast<float>(scale)},
      next_dropping(scores_BHQK.numel(), p, stream, part));
}

namespace {

// [B, T, n*D] -> n views [B, H, T, D/H].
std::vector<at::Tensor> split_heads(const at::Tensor& x, int64_t parts, int64_t heads) {
  const int64_t width = x.size(2) / parts;
  return x.view({x.size(0), x.size(1), parts, heads, width / heads})
      .permute({2, 0, 3, 1, 4})
      .unbind(0);
}

void check_lengths(const at::Tensor& lengths_B, int64_t batch, int64_t longest,
                   const at::Tensor& x) {
  TORCH_CHECK_VALUE(lengths_B.dtype() == at::kLong && lengths_B.is_contiguous() &&
                        lengths_B.sizes() == at::IntArrayRef({batch}),
                    "attention: expected int64 lengths of ", batch, " sentences, got ",
                    lengths_B.toString(), " ", lengths_B.sizes());
  check_device(lengths_B, x, "attention: lengths");
  check_range("attention: lengths", lengths_B, 1, longest);
}

// That x [N, ...] has packed rows so.
void check_packed(const at::Tensor& x, const SentenceRows& rows, int64_t batch) {
  check_lengths(rows.lengths_B, batch, rows.longest, x);
  const at::Tensor& elements = rows.elements_N;
  TORCH_CHECK_VALUE(
      elements.dtype() == at::kLong && elements.dim() == 1 && elements.size(0) == x.size(0),
      "attention: expected ", x.size(0), " int64 elements, got ", elements.toString(), " ",
      elements.sizes());
  check_device(elements, x, "attention: elements");
  const auto sum = rows.lengths_B.sum().item<int64_t>();
  TORCH_CHECK_VALUE(sum == elements.size(0), "attention: expected ", elements.size(0),
                    " rows of sentences, got lengths of ", sum);
}

// As operands_of takes x and kv, with the rows of both.
at::Tensor attention_of(const at::Tensor& x, const SentenceRows& of_queries, const at::Tensor& kv,
                        const SentenceRows& of_keys, const AttentionOptions& options,
                        DropoutStream& stream) {
  const at::Tensor& lengths_B = of_keys.lengths_B;
  const bool packed = of_queries.packed();
  const int64_t batch = packed ? of_queries.lengths_B.numel() : x.size(0);
  const int64_t queries = of_queries.longest, keys = of_keys.longest;
  const int64_t width = kv.defined() ? x.size(-1) : x.size(-1) / 3;
  const int64_t head_width = width / options.heads;
  const double scale = 1 / std::sqrt(static_cast<double>(head_width));
  const AttentionKernels& fused = kernels_for(x).attention;
  if (packed) {
    TORCH_CHECK_NOT_IMPLEMENTED(fused.takes_packed, "attention: expected padded rows on ",
                                x.device(), ", got packed ones");
    check_packed(x, of_queries, batch);
    if (kv.defined()) check_packed(kv, of_keys, batch);
  } else {
    check_lengths(lengths_B, batch, keys, x);
  }
  if (fused.forward != nullptr && (fused.takes == nullptr || fused.takes(x, kv, head_width))) {
    return FusedAttention::apply(
        x.contiguous(), kv.defined() ? std::optional(kv.contiguous()) : std::nullopt, options.heads,
        packed ? PackedSentences{of_queries.lengths_B, queries, keys} : PackedSentences{},
        SoftmaxMask{.key_lengths_B = lengths_B,
                    .causal = options.causal,
                    .scale = static_cast<float>(scale)},
        next_dropping(batch * options.heads * queries * keys, options.dropout, stream,
                      options.part));
  }
  std::vector<at::Tensor> heads = split_heads(x, kv.defined() ? 1 : 3, options.heads);
  if (kv.defined()) {
    for (const at::Tensor& part : split_heads(kv, 2, options.heads)) heads.push_back(part);
  }
  const at::Tensor scores = at::matmul(heads[0], heads[1].transpose(2, 3));
  const at::Tensor weights = masked_softmax(scores.contiguous(), lengths_B, options.causal, scale,
                                            options.dropout, stream, options.part);
  return at::matmul(weights, heads[2]).transpose(1, 2).reshape({batch, queries, width});
}

}  // namespace

at::Tensor attention(const at::Tensor& q_BQD, const at::Tensor& kv_BKE,
                     const at::Tensor& key_lengths_B, const AttentionOptions& options,
                     DropoutStream& stream) {
  const auto longest = [](const at::Tensor& x) { return x.dim() == 3 ? x.size(1) : 0; };
  return attention(q_BQD, {.longest = longest(q_BQD)}, kv_BKE,
                   {.lengths_B = key_lengths_B, .longest = longest(kv_BKE)}, options, stream);
}

at::Tensor attention(const at::Tensor& q, const SentenceRows& queries, const at::Tensor& kv,
                     const SentenceRows& keys, const AttentionOptions& options,
                     DropoutStream& stream) {
  const bool packed = queries.packed();
  const bool fits = packed ? keys.packed() && q.dim() == 2 && kv.dim() == 2
                           : !keys.packed() && q.dim() == 3 && kv.dim() == 3 &&
                                 kv.size(0) == q.size(0) && q.size(1) == queries.longest &&
                                 kv.size(1) == keys.longest;
  TORCH_CHECK_VALUE(fits && kv.size(-1) == 2 * q.size(-1) && options.heads > 0 &&
                        q.size(-1) % options.heads == 0 && kv.dtype() == q.dtype(),
                    "attention: expected queries ", packed ? "[N, D]" : "[B, Q, D]",
                    " with a multiple of ", options.heads, " columns, and keys with values ",
                    packed ? "[M, 2 D]" : "[B, K, 2 D]", " of the same type, got ", q.toString(),
                    " ", q.sizes(), " and ", kv.toString(), " ", kv.sizes());
  check_device(kv, q, "attention: keys");
  return attention_of(q, queries, kv, keys, options, stream);
}

at::Tensor self_attention(const at::Tensor& qkv_BTE, const at::Tensor& key_lengths_B,
                          const AttentionOptions& options, DropoutStream& stream) {
  const int64_t longest = qkv_BTE.dim() == 3 ? qkv_BTE.size(1) : 0;
  return self_attention(qkv_BTE, {.lengths_B = key_lengths_B, .longest = longest}, options, stream);
}

at::Tensor self_attention(const at::Tensor& qkv, const SentenceRows& rows,
                          const AttentionOptions& options, DropoutStream& stream) {
  const bool packed = rows.packed();
  TORCH_CHECK_VALUE((packed ? qkv.dim() == 2 : qkv.dim() == 3 && qkv.size(1) == rows.longest) &&
                        options.heads > 0 && qkv.size(-1) % (3 * options.heads) == 0,
                    "self_attention: expected queries, keys and values ",
                    packed ? "[N, 3 D]" : "[B, T, 3 D]", " with D a multiple of ", options.heads,
                    ", got ", qkv.sizes());
  return attention_of(qkv, rows, {}, rows, options, stream);
}

namespace {

void check_linear(const at::Tensor& x, const at::Tensor& weight_MK,
                  const std::optional<at::Tensor>& bias_M) {
  TORCH_CHECK_VALUE(weight_MK.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight_MK.size(1),
                    "linear: expected x [..., K] and weight [M, K], got ", x.sizes(), " and ",
                    weight_MK.sizes());
  TORCH_CHECK_VALUE(!bias_M || bias_M->sizes() == weight_MK.sizes().slice(0, 1),
                    "linear: expected bias [", weight_MK.size(0), "], got ", bias_M->sizes());
  check_device(weight_MK, x, "linear: weight");
  if (bias_M) check_device(*bias_M, x, "linear: bias");
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_MK,
                  const std::optional<at::Tensor>& bias_M, at::ScalarType type) {
  check_linear(x, weight_MK, bias_M);
  return Linear::apply(x, weight_MK, bias_M, type);
}

at::Tensor linear_relu_dropout(const at::Tensor& x, const at::Tensor& weight_MK,
                               const at::Tensor& bias_M, const LinearReluDropoutOptions& options,
                               DropoutStream& stream) {
  const auto& [type, p, part] = options;
  check_linear(x, weight_MK, bias_M);
  const int64_t width = weight_MK.size(0);
  check_whole_rows("linear_relu_dropout", part, width, p);
  const BiasReluDropoutKernels& fused = kernels_for(x).bias_relu_dropout;
  if (fused.forward == nullptr || !fused.takes(bias_M, type))
    return relu_dropout(linear(x, weight_MK, bias_M, type), p, stream, part);
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  return LinearReluDropout::apply(x, weight_MK, bias_M, type,
                                  next_dropping(rows * width, p, stream, part));
}

bool takes_packed_rows(const at::Tensor& tensor) {
  return kernels_for(tensor).attention.takes_packed;
}

at::Tensor embedding(const at::Tensor& table_VD, const at::Tensor& ids) {
  return at::GradMode::is_enabled() ? Embedding::apply(table_VD, ids)
                                    : at::embedding(table_VD, ids);
}

LossSums smoothed_cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                                const at::Tensor& labels_N, double smoothing) {
  TORCH_CHECK_VALUE(
      hidden_ND.dim() == 2 && weight_VD.dim() == 2 && hidden_ND.size(1) == weight_VD.size(1) &&
          labels_N.dim() == 1 && labels_N.size(0) == hidden_ND.size(0) &&
          labels_N.dtype() == at::kLong && labels_N.is_contiguous(),
      "smoothed_cross_entropy: expected hidden [N, D], weight [V, D], int64 labels [N], got ",
      hidden_ND.sizes(), ", ", weight_VD.sizes(), ", ", labels_N.sizes());
  check_device(weight_VD, hidden_ND, "smoothed_cross_entropy: weight");
  check_device(labels_N, hidden_ND, "smoothed_cross_entropy: labels");
  check_range("smoothed_cross_entropy: labels", labels_N, 0, weight_VD.size(0) - 1);
  const bool with_gradient =
      at::GradMode::is_enabled() && (hidden_ND.requires_grad() || weight_VD.requires_grad());
  const variable_list sums = SmoothedCrossEntropy::apply(hidden_ND.contiguous(), weight_VD,
                                                         labels_N, smoothing, with_gradient);
  return {sums[0], sums[1]};
}

at::Tensor attend(const at::Tensor& queries_ND, const SeenRows& seen, int64_t heads) {
  const int64_t width = queries_ND.size(1);
  TORCH_CHECK_VALUE(queries_ND.dim() == 2 && queries_ND.stride(1) == 1 && width % heads == 0 &&
                        std::ssize(seen.of_query) == queries_ND.size(0),
                    "attend: expected a query for each range of rows and a multiple of ", heads,
                    " columns, got ", queries_ND.sizes(), " for ", seen.of_query.size());
  const int64_t head_width = width / heads;
  const HeadShape shape{
      .heads = heads,
      .width = head_width,
      .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_width)))};
  size_t most = 0;
  for (const SeenRows::Range& range : seen.of_query) most = std::max(most, range.count);
  at::Tensor out = at::empty(queries_ND.sizes(), queries_ND.options());
  for_type("attend", queries_ND, [&]<class T>(const LoopsOf<T>& table, T*) {
    const int64_t unit = kScoresUnit;
    const int64_t scores = (static_cast<int64_t>(most) + unit - 1) / unit * unit;
    std::vector<typename LoopsOf<T>::Sum> scratch(static_cast<size_t>(width + heads * scores));
    std::vector<const T*> rows(most);
    for (int64_t n = 0; n < queries_ND.size(0); ++n) {
      const auto [first, count] = seen.of_query[static_cast<size_t>(n)];
      for (size_t i = 0; i < count; ++i) rows[i] = static_cast<const T*>(seen.rows[first + i]);
      table.attend(data<T>(queries_ND) + n * queries_ND.stride(0), rows.data(),
                   static_cast<int64_t>(count), shape, scratch.data(), data<T>(out) + n * width);
    }
  });
  return out;
}

LogProbs::LogProbs(const at::Tensor& scores_NV, const std::optional<Questions>& questions,
                   bool with_sums) {
  if (questions && !kernels_for(scores_NV).has_inference) {
    read_answers(scores_NV, *questions);
  } else {
    read_all(scores_NV, with_sums);
  }
  check_finite();
}

LogProbs::LogProbs(std::span<const at::Tensor> blocks,
                   std::span<const std::span<const int32_t>> columns, bool with_sums) {
  std::vector<at::Tensor> given;
  for (const at::Tensor& block : blocks) {
    TORCH_CHECK_VALUE(block.is_cpu() && block.dim() == 2 && block.size(0) == std::ssize(columns) &&
                          block.size(1) == blocks.front().size(1),
                      "LogProbs: expected scores on the CPU with a row for each of ",
                      columns.size(), " lists of columns, got ", block.toString(), " ",
                      block.sizes());
    given.push_back(block.contiguous());
  }
  size_t most = 0;
  for (const auto& own : columns) {
    most = std::max(most, own.size());
    row_columns_.push_back(std::ssize(own));
  }
  // All rows begin alike in memory.
  constexpr size_t kUnit = 64;
  most = (most + kUnit - 1) / kUnit * kUnit;
  const at::Tensor& first = given.at(0);
  const at::Tensor chosen = at::empty({first.size(0), static_cast<int64_t>(most)}, first.options());
  for_type("LogProbs", first, [&]<class T>(const LoopsOf<T>&, T*) {
    const auto width = static_cast<int32_t>(first.size(1));
    std::vector<const T*> from;
    for (const at::Tensor& block : given) from.push_back(data<T>(block));
    T* to = data<T>(chosen);
    for (const auto& own : columns) {
      for (size_t i = 0; i < own.size(); ++i)
        to[i] = from[static_cast<size_t>(own[i] / width)][own[i] % width];
      for (const T*& block : from) block += width;
      to += most;
    }
  });
  read_all(chosen, with_sums);
  check_finite();
}

LogProbs::LogProbs(const Int8Scores& scores)
    : scores_NV_(scores.blocks),
      columns_(scores.columns),
      top_columns_(kInt8Columns),
      tops_(scores.tops) {
  const int64_t blocks = tops_.size(1);
  for (int64_t n = 0; n < tops_.size(0); ++n) {
    const float* tops = tops_.const_data_ptr<float>() + n * blocks;
    if (scores.sums.defined()) {
      log_sums_.push_back(
          loops().int8.log_sum(tops, scores.sums.const_data_ptr<float>() + n * blocks, blocks));
    } else {
      const bool finite =
          std::all_of(tops, tops + blocks, [](float top) { return std::isfinite(top); });
      log_sums_.push_back(finite ? 0 : std::nan(""));
    }
  }
  check_finite();
}

void LogProbs::check_finite() const {
  TORCH_CHECK(std::ranges::all_of(log_sums_, [](double sum) { return std::isfinite(sum); }),
              "the model's scores are not finite: it has diverged, or its parameters are damaged");
}

void LogProbs::read_all(const at::Tensor& scores_NV, bool with_sums) {
  scores_NV_ = scores_NV.cpu().contiguous();
  const int64_t rows = scores_NV_.size(0);
  const int64_t columns = scores_NV_.size(1);
  const int64_t blocks = (columns + kTopColumns - 1) / kTopColumns;
  columns_ = columns;
  top_columns_ = kTopColumns;
  const bool wide = scores_NV_.scalar_type() == at::kDouble;
  // A row with fewer columns has blocks of none.
  tops_ = at::full({rows, blocks}, -std::numeric_limits<double>::infinity(),
                   wide ? at::kDouble : at::kFloat);
  log_sums_.resize(static_cast<size_t>(rows));
  for_type("LogProbs", scores_NV_, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    for (int64_t n = 0; n < rows; ++n) {
      log_sums_[static_cast<size_t>(n)] =
          table.log_sum_exp(data<T>(scores_NV_) + n * columns, columns_of(n), with_sums,
                            data<Sum>(tops_) + n * blocks);
    }
  });
}

int64_t LogProbs::columns_of(int64_t row) const {
  return row_columns_.empty() ? columns_ : row_columns_[static_cast<size_t>(row)];
}

void LogProbs::read_answers(const at::Tensor& scores_NV, const Questions& questions) {
  scores_NV_ = scores_NV;
  columns_ = scores_NV.size(1);
  column_ = questions.column;
  const int64_t columns = scores_NV.size(1);
  const int64_t count = std::min(questions.greatest, columns);
  const at::Tensor scores =
      scores_NV.scalar_type() == at::kDouble ? scores_NV : scores_NV.to(at::kFloat);
  const at::Tensor top = std::get<0>(scores.topk(count, 1));
  // Which of equal columns topk takes is left to the device. So the columns are taken by numbers of
  // which no two are equal: above the last of the greatest more than 1, the same as it more than 0,
  // in units of `columns`; of the same score the first columns have the greatest numbers.
  const at::Tensor last = top.narrow(1, count - 1, 1);
  const at::Tensor rank = (scores.gt(last).to(at::kInt) + scores.ge(last)) * columns -
                          at::arange(columns, scores.options().dtype(at::kInt));
  const at::Tensor chosen = std::get<1>(rank.topk(count, 1));
  const at::Tensor first = top.narrow(1, 0, 1);
  const at::Tensor log_sums =
      at::log(at::exp(scores - first).sum(1, /*keepdim=*/true).to(at::kDouble)) + first +
      scores.amin(1, /*keepdim=*/true) * 0;  // NaN for infinity downwards
  answers_ = at::cat({log_sums, scores.narrow(1, column_, 1).to(at::kDouble),
                      scores.gather(1, chosen).to(at::kDouble), chosen.to(at::kDouble)},
                     1)
                 .cpu();
  for (int64_t n = 0; n < answers_.size(0); ++n)
    log_sums_.push_back(answers_.const_data_ptr<double>()[n * answers_.size(1)]);
}

namespace {

// A row of Int8Scores::blocks.
struct BlockedRow {
  const float* first;
  int64_t stride;
  const float& operator[](int64_t column) const {
    return first[column / kInt8Columns * stride + column % kInt8Columns];
  }
};

}  // namespace

template <class Body>
auto LogProbs::with_row(int64_t row, Body body) const {
  const int64_t blocks = tops_.size(1);
  if (scores_NV_.scalar_type() == at::kDouble) {
    return body(scores_NV_.const_data_ptr<double>() + row * columns_,
                tops_.const_data_ptr<double>() + row * blocks);
  }
  const float* top = tops_.const_data_ptr<float>() + row * blocks;
  if (scores_NV_.scalar_type() == at::kBFloat16)
    return body(scores_NV_.const_data_ptr<at::BFloat16>() + row * columns_, top);
  const auto* scores = scores_NV_.const_data_ptr<float>();
  if (scores_NV_.dim() == 2) return body(scores + row * columns_, top);
  return body(BlockedRow{scores + row * kInt8Columns, tops_.size(0) * kInt8Columns}, top);
}

double LogProbs::at(int64_t row, int64_t column) const {
  if (answers_.defined()) {
    TORCH_INTERNAL_ASSERT(column == column_);
    return answers_.const_data_ptr<double>()[row * answers_.size(1) + 1] -
           log_sums_[static_cast<size_t>(row)];
  }
  return with_row(row, [&](const auto& scores, const auto*) {
    return static_cast<double>(scores[column]) - log_sums_[static_cast<size_t>(row)];
  });
}

std::vector<Candidate> LogProbs::all(int64_t row, std::span<const int64_t> banned) const {
  TORCH_INTERNAL_ASSERT(!answers_.defined() && row_columns_.empty());
  std::vector<Candidate> found;
  found.reserve(static_cast<size_t>(columns_));
  with_row(row, [&](const auto& scores, const auto*) {
    for (int64_t c = 0; c < columns_; ++c) {
      if (std::ranges::find(banned, c) == banned.end())
        found.push_back({c, static_cast<double>(scores[c]) - log_sums_[static_cast<size_t>(row)]});
    }
  });
  return found;
}

namespace {

bool contains(std::span<const int64_t> columns, int64_t column) {
  return std::ranges::find(columns, column) != columns.end();
}

// (p / p of the score `top`)^exponent
double weight_of(double score, double top, double exponent) {
  return std::exp((score - top) * exponent);
}

}  // namespace

Candidate LogProbs::likeliest(int64_t row, std::span<const int64_t> banned) const {
  const auto found = greatest(row, 1, banned);
  TORCH_CHECK(!found.empty(), "sampling: no token is left to draw from");
  return found.front();
}

std::vector<double> LogProbs::block_weights(int64_t row, double top, double exponent,
                                            std::span<const int64_t> banned) const {
  TORCH_INTERNAL_ASSERT(!answers_.defined() && row_columns_.empty());
  std::vector<double> sums(static_cast<size_t>(tops_.size(1)));
  with_row(row, [&](const auto& scores, const auto*) {
    for (size_t block = 0; block < sums.size(); ++block) {
      const int64_t first = static_cast<int64_t>(block) * top_columns_;
      const int64_t end = std::min(columns_, first + top_columns_);
      double& sum = sums[block];
      if (std::ranges::any_of(banned, [&](int64_t c) { return c >= first && c < end; })) {
        for (int64_t c = first; c < end; ++c)
          if (!contains(banned, c)) sum += weight_of(static_cast<double>(scores[c]), top, exponent);
      } else {
        for_type("LogProbs", scores_NV_, [&]<class T>(const LoopsOf<T>& table, T*) {
          using Sum = typename LoopsOf<T>::Sum;
          sum = static_cast<double>(table.sum_of_exp(reinterpret_cast<const T*>(&scores[first]),
                                                     end - first, static_cast<Sum>(top),
                                                     static_cast<Sum>(exponent)));
        });
      }
    }
  });
  return sums;
}

double LogProbs::sum_of_weights(int64_t row, double exponent,
                                std::span<const int64_t> banned) const {
  const double top = likeliest(row, banned).log_prob + log_sums_[static_cast<size_t>(row)];
  const auto sums = block_weights(row, top, exponent, banned);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

Candidate LogProbs::draw(int64_t row, double exponent, std::span<const int64_t> banned,
                         double number) const {
  const Candidate first_choice = likeliest(row, banned);
  const double log_sum = log_sums_[static_cast<size_t>(row)], top = first_choice.log_prob + log_sum;
  const auto sums = block_weights(row, top, exponent, banned);
  double left = number * std::accumulate(sums.begin(), sums.end(), 0.0);
  size_t block = 0;
  for (; block + 1 < sums.size() && left >= sums[block]; ++block) left -= sums[block];
  // Rounding may leave a last trace: then the last one is taken, of a block that has any.
  while (block > 0 && sums[block] == 0) --block;
  const int64_t first = static_cast<int64_t>(block) * top_columns_;
  return with_row(row, [&](const auto& scores, const auto*) {
    int64_t drawn = first_choice.column;
    for (int64_t c = first; c < std::min(columns_, first + top_columns_); ++c) {
      if (contains(banned, c)) continue;
      drawn = c;
      left -= weight_of(static_cast<double>(scores[c]), top, exponent);
      if (left < 0) break;
    }
    return Candidate{drawn, static_cast<double>(scores[drawn]) - log_sum};
  });
}

std::vector<Candidate> LogProbs::likely(int64_t row, size_t wanted,
                                        std::span<const int64_t> banned) const {
  const int64_t columns = columns_of(row);
  std::vector<Candidate> found;
  if (answers_.defined()) {
    const int64_t read = (answers_.size(1) - 2) / 2;
    TORCH_INTERNAL_ASSERT(read == columns || read >= static_cast<int64_t>(wanted));
    const double* scores = answers_.const_data_ptr<double>() + row * answers_.size(1) + 2;
    for (int64_t i = 0; i < read; ++i) {
      const auto column = static_cast<int64_t>(scores[read + i]);
      if (std::ranges::find(banned, column) == banned.end()) found.push_back({column, scores[i]});
    }
    return found;
  }
  with_row(row, [&](const auto& scores, const auto* tops) {
    // As many blocks as are wanted hold a value of at least `bound` each, so whatever is below it
    // is not among the greatest: few blocks are left to look into.
    using Top = std::decay_t<decltype(*tops)>;
    std::vector<Top> order(tops, tops + tops_.size(1));
    Top bound = -std::numeric_limits<Top>::infinity();
    if (wanted <= order.size()) {
      const auto last = order.begin() + static_cast<std::ptrdiff_t>(wanted) - 1;
      std::ranges::nth_element(order, last, std::greater{});
      bound = *last;
    }
    for (int64_t block = 0; block < tops_.size(1); ++block) {
      if (tops[block] < bound) continue;
      const int64_t end = std::min(columns, (block + 1) * top_columns_);
      for (int64_t c = block * top_columns_; c < end; ++c) {
        const auto score = static_cast<Top>(scores[c]);
        if (score >= bound && std::ranges::find(banned, c) == banned.end())
          found.push_back({c, static_cast<double>(score)});
      }
    }
  });
  return found;
}

std::vector<Candidate> LogProbs::greatest(int64_t row, int64_t count,
                                          std::span<const int64_t> banned) const {
  std::vector<Candidate> found = likely(row, static_cast<size_t>(count) + banned.size(), banned);
  const auto kept = std::min(found.size(), static_cast<size_t>(count));
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(kept), found.end(),
                    [](const Candidate& a, const Candidate& b) {
                      return std::pair(-a.log_prob, a.column) < std::pair(-b.log_prob, b.column);
                    });
  found.resize(kept);
  for (Candidate& candidate : found) candidate.log_prob -= log_sums_[static_cast<size_t>(row)];
  return found;
}

}  // namespace cohort::nmt
