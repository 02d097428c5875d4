// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/kernels.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include "cohort/nmt/kernels/cpu/for_type.h"

namespace cohort::nmt {
namespace {

// Calls body(first element here, how many, rule) for elements that are neighbours in the whole,
// too.
template <class Body>
void for_runs(int64_t num_elements, const Dropping& dropping, const Body& body) {
  auto [rule, part] = dropping;
  if (rule.threshold == 0 || part.size == part.whole) return body(int64_t{0}, num_elements, rule);
  rule.first = part.first;
  for (int64_t first = 0; first < num_elements; first += part.size, rule.first += part.whole)
    body(first, part.size, rule);
}

// loop_of(loops): which of them computes elements of the result from those of `in`.
template <class LoopOf>
at::Tensor run_loop(const char* operation, const at::Tensor& in, const Dropping& dropping,
                    LoopOf loop_of) {
  at::Tensor out = at::empty_like(in);
  for_type(operation, in, [&]<class T>(const LoopsOf<T>& table, T*) {
    for_runs(in.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      loop_of(table)(data<T>(in) + first, data<T>(out) + first, count, rule);
    });
  });
  return out;
}

at::Tensor relu_backward_by_loops(const at::Tensor& out, const at::Tensor& grad, float scale) {
  at::Tensor grad_x = at::empty_like(grad);
  for_type("relu_dropout", out, [&]<class T>(const LoopsOf<T>& table, T*) {
    table.relu_dropout_backward(data<T>(out), data<T>(grad), data<T>(grad_x), grad.numel(), scale);
  });
  return grad_x;
}

template <class ActivationLoops>
at::Tensor activation_backward_by_loops(const at::Tensor& x, const at::Tensor& grad,
                                        const Dropping& dropping) {
  at::Tensor grad_x = at::empty_like(grad);
  for_type(ActivationLoops::kName, x, [&]<class T>(const LoopsOf<T>& table, T*) {
    for_runs(grad.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      ActivationLoops::of(table).backward(data<T>(x) + first, data<T>(grad) + first,
                                          data<T>(grad_x) + first, count, rule);
    });
  });
  return grad_x;
}

// Of `count` elements of the scores, from `first` on: of whole sentences.
SoftmaxShape shape_of(const at::Tensor& scores, const SoftmaxMask& mask, int64_t first,
                      int64_t count) {
  const int64_t sentence = scores.size(1) * scores.size(2) * scores.size(3);
  return {.batch = sentence == 0 ? 0 : count / sentence,
          .heads = scores.size(1),
          .queries = scores.size(2),
          .keys = scores.size(3),
          .key_lengths =
              mask.key_lengths_B.data_ptr<int64_t>() + (sentence == 0 ? 0 : first / sentence),
          .causal = mask.causal,
          .scale = mask.scale};
}

std::pair<at::Tensor, at::Tensor> softmax_by_loops(const at::Tensor& scores,
                                                   const SoftmaxMask& mask,
                                                   const Dropping& dropping) {
  at::Tensor probs = at::empty_like(scores);
  at::Tensor dropped = dropping.rule.threshold == 0 ? at::Tensor() : at::empty_like(scores);
  for_type("masked_softmax", scores, [&]<class T>(const LoopsOf<T>& table, T*) {
    for_runs(scores.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      table.softmax(data<T>(scores) + first, data<T>(probs) + first,
                    dropped.defined() ? data<T>(dropped) + first : nullptr,
                    shape_of(scores, mask, first, count), rule);
    });
  });
  return {probs, dropped};
}

at::Tensor softmax_backward_by_loops(const at::Tensor& probs, const at::Tensor& grad,
                                     const SoftmaxMask& mask, const Dropping& dropping) {
  at::Tensor grad_scores = at::empty_like(grad);
  for_type("masked_softmax", probs, [&]<class T>(const LoopsOf<T>& table, T*) {
    for_runs(probs.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      table.softmax_backward(data<T>(probs) + first, data<T>(grad) + first,
                             data<T>(grad_scores) + first, shape_of(probs, mask, first, count),
                             rule);
    });
  });
  return grad_scores;
}

at::Tensor dropout_by_loops(const at::Tensor& x, const Dropping& dropping) {
  return run_loop("dropout", x, dropping, [](const auto& table) { return table.dropout; });
}

// Number in the whole of the first element of the scores of head `h` of sentence `b`.
int64_t number_of(const Dropping& dropping, int64_t sentence, int64_t head, int64_t b, int64_t h) {
  const auto& [rule, part] = dropping;
  const int64_t here = b * sentence + h * head;
  if (rule.threshold == 0 || part.size == part.whole) return here;
  return here / part.size * part.whole + here % part.size + part.first;
}

// Calls body(table, the head's operands, what it drops, its scratch, b, h) for each head of each sentence.
template <class Body>
void for_heads(const AttentionOperands& operands, const SoftmaxMask& mask, const Dropping& dropping,
               const Body& body) {
  const at::Tensor &q = operands.q_BQD, &k = operands.k_BKD, &v = operands.v_BKD;
  const int64_t heads = operands.heads;
  const int64_t queries = q.size(1), keys = k.size(1), width = q.size(2) / heads;
  const auto* lengths = mask.key_lengths_B.const_data_ptr<int64_t>();
  for_type("attention", q, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    constexpr int64_t kProductsOfATask = int64_t{1} << 20;
    at::parallel_for(0, q.size(0) * heads, 1 + kProductsOfATask / (1 + queries * keys * width),
                     [&](int64_t begin, int64_t end) {
                       at::Tensor scratch = at::empty(
                           {table.attention.scratch(keys, width)},
                           at::TensorOptions().dtype(c10::CppTypeToScalarType<Sum>::value));
                       for (int64_t i = begin; i < end; ++i) {
                         const int64_t b = i / heads, h = i % heads;
                         DropoutRule rule = dropping.rule;
                         rule.first =
                             number_of(dropping, heads * queries * keys, queries * keys, b, h);
                         body(table.attention,
                              AttentionHead<T>{.queries = data<T>(q) + b * q.stride(0) + h * width,
                                               .keys = data<T>(k) + b * k.stride(0) + h * width,
                                               .values = data<T>(v) + b * v.stride(0) + h * width,
                                               .query_stride = q.stride(1),
                                               .key_stride = k.stride(1),
                                               .num_queries = queries,
                                               .num_keys = lengths[b],
                                               .all_keys = keys,
                                               .width = width,
                                               .causal = mask.causal,
                                               .scale = mask.scale},
                              rule, data<Sum>(scratch), b, h);
                       }
                     });
  });
}

std::pair<at::Tensor, at::Tensor> attention_by_loops(const AttentionOperands& operands,
                                                     const SoftmaxMask& mask,
                                                     const Dropping& dropping) {
  const at::Tensor& q = operands.q_BQD;
  const int64_t queries = q.size(1), width = q.size(2) / operands.heads;
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor stats =
      at::empty({q.size(0), operands.heads, queries, 2},
                q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  for_heads(operands, mask, dropping,
            [&]<class T, class Sum>(const AttentionLoops<T>& loops, const AttentionHead<T>& head,
                                    const DropoutRule& rule, Sum* scratch, int64_t b, int64_t h) {
              loops.forward(head, rule, scratch, data<T>(out) + b * out.stride(0) + h * width,
                            out.stride(1),
                            data<Sum>(stats) + (b * operands.heads + h) * queries * 2);
            });
  return {out, stats};
}

void attention_backward_by_loops(const AttentionOperands& operands, const at::Tensor& /*out*/,
                                 const at::Tensor& stats, const at::Tensor& grad,
                                 const SoftmaxMask& mask, const Dropping& dropping,
                                 const AttentionOperands& grads) {
  const int64_t queries = grad.size(1), width = grad.size(2) / operands.heads;
  for_heads(operands, mask, dropping,
            [&]<class T, class Sum>(const AttentionLoops<T>& loops, const AttentionHead<T>& head,
                                    const DropoutRule& rule, Sum* scratch, int64_t b, int64_t h) {
              const auto of_head = [&](const at::Tensor& x) {
                return data<T>(x) + b * x.stride(0) + h * width;
              };
              loops.backward(head, rule, data<Sum>(stats) + (b * operands.heads + h) * queries * 2,
                             of_head(grad), grad.stride(1), scratch,
                             AttentionHeadGrads<T>{.queries = of_head(grads.q_BQD),
                                                   .keys = of_head(grads.k_BKD),
                                                   .values = of_head(grads.v_BKD)});
            });
}

void cross_entropy_by_loops(const at::Tensor& logits, const at::Tensor& labels, double smoothing,
                            bool with_gradient, const at::Tensor& sums) {
  const int64_t columns = logits.size(1);
  at::Tensor scratch = at::empty({columns}, at::kFloat);
  for_type("smoothed_cross_entropy", logits, [&]<class T>(const LoopsOf<T>& table, T*) {
    table.cross_entropy(data<T>(logits), labels.const_data_ptr<int64_t>(), logits.size(0), columns,
                        smoothing, with_gradient, scratch.data_ptr<float>(),
                        sums.data_ptr<double>());
  });
}

struct GeluLoops {
  static constexpr const char* kName = "gelu_dropout";
  static const auto& of(const auto& table) { return table.gelu; }
};

struct SwishLoops {
  static constexpr const char* kName = "swish_dropout";
  static const auto& of(const auto& table) { return table.swish; }
};

template <class ActivationLoops>
constexpr ActivationKernels activation_by_loops() {
  return {.forward =
              [](const at::Tensor& x, const Dropping& dropping) {
                return run_loop(ActivationLoops::kName, x, dropping, [](const auto& table) {
                  return ActivationLoops::of(table).forward;
                });
              },
          .backward = activation_backward_by_loops<ActivationLoops>};
}

}  // namespace

extern const Kernels kAtenKernels;
extern const Kernels kCpuKernels;
const Kernels kCpuKernels = {
    .has_inference = true,
    .dropout = dropout_by_loops,
    .add_dropout = [](const at::Tensor& x, const at::Tensor& y,
                      const Dropping& dropping) { return x + dropout_by_loops(y, dropping); },
    .add_dropout_backward =
        [](const at::Tensor& grad, at::ScalarType type, const Dropping& dropping) {
          return dropout_by_loops(grad.to(type), dropping);
        },
    .relu_dropout =
        [](const at::Tensor& x, const Dropping& dropping) {
          return run_loop("relu_dropout", x, dropping,
                          [](const auto& table) { return table.relu_dropout; });
        },
    .relu_dropout_backward = relu_backward_by_loops,
    .gelu = activation_by_loops<GeluLoops>(),
    .swish = activation_by_loops<SwishLoops>(),
    .softmax = softmax_by_loops,
    .softmax_backward = softmax_backward_by_loops,
    .attention = {.forward = attention_by_loops, .backward = attention_backward_by_loops},
    .weight_gradient =
        [](const at::Tensor& grad, const at::Tensor& x, at::ScalarType type) {
          return kAtenKernels.weight_gradient(grad, x, type);
        },
    .cross_entropy = cross_entropy_by_loops};

}  // namespace cohort::nmt
