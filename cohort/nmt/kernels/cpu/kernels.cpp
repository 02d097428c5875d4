// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/kernels.h"

#include <ATen/Parallel.h>
#include <algorithm>
#include <array>
#include <torch/types.h>
#include <vector>

#include "cohort/nmt/kernels/cpu/for_type.h"
#include "cohort/nmt/kernels/cpu/tile_product.h"

namespace cohort::nmt {
namespace {

// Number in the whole of element `here` of this part.
int64_t number_of(const Dropping& dropping, int64_t here) {
  const auto& [rule, part] = dropping;
  if (rule.threshold == 0 || part.is_all()) return here;
  const int64_t run = here / part.size;
  return (part.rows_N.defined() ? part.rows_N.const_data_ptr<int64_t>()[run] : run) * part.whole +
         here % part.size + part.first;
}

// The rule for neighbours from `first` on that are neighbours in the whole, too.
DropoutRule rule_from(const Dropping& dropping, int64_t first) {
  DropoutRule rule = dropping.rule;
  rule.first = number_of(dropping, first);
  return rule;
}

// Calls body(first element here, how many, rule) for elements that are neighbours in the whole,
// too.
template <class Body>
void for_runs(int64_t num_elements, const Dropping& dropping, const Body& body) {
  const auto& [rule, part] = dropping;
  if (rule.threshold == 0 || part.is_all()) return body(int64_t{0}, num_elements, rule);
  for (int64_t first = 0; first < num_elements; first += part.size)
    body(first, part.size, rule_from(dropping, first));
}

// What sums of numbers of `type` run in.
at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
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

at::Tensor add_dropout_by_loops(const at::Tensor& x, const at::Tensor& y,
                                const Dropping& dropping) {
  if (x.scalar_type() != sum_type(y.scalar_type())) return x + dropout_by_loops(y, dropping);
  at::Tensor out = at::empty_like(x);
  for_type("add_dropout", y, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    for_runs(y.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      table.add_dropout(data<Sum>(x) + first, data<T>(y) + first, data<Sum>(out) + first, count,
                        rule);
    });
  });
  return out;
}

at::Tensor add_dropout_backward_by_loops(const at::Tensor& grad, at::ScalarType type,
                                         const Dropping& dropping) {
  if (grad.scalar_type() != sum_type(type)) return dropout_by_loops(grad.to(type), dropping);
  at::Tensor out = at::empty(grad.sizes(), grad.options().dtype(type));
  for_type("add_dropout", out, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    for_runs(grad.numel(), dropping, [&](int64_t first, int64_t count, const DropoutRule& rule) {
      table.narrow_dropout(data<Sum>(grad) + first, data<T>(out) + first, count, rule);
    });
  });
  return out;
}

// Elements that a task should have at least.
constexpr int64_t kElementsOfATask = 32768;

// Calls body(row) for each row.
template <class Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  at::parallel_for(0, rows, 1 + kElementsOfATask / (1 + width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// Calls body(row, sums), which adds to each sum, for each row; `totals` become the sums over all. They are first added up over a
// few rows, then over those in order: the result is the same on any number of threads.
template <class Sum, size_t kSums, class Body>
void sum_over_rows(int64_t rows, const std::array<at::Tensor, kSums>& totals, const Body& body) {
  constexpr int64_t kRows = 64;
  const int64_t width = totals[0].numel(), tasks = (rows + kRows - 1) / kRows;
  const auto sums_of = [&](const at::Tensor& part, int64_t task) {
    std::array<Sum*, kSums> sums{};
    for (size_t i = 0; i < kSums; ++i)
      sums[i] =
          data<Sum>(part) + (task * static_cast<int64_t>(kSums) + static_cast<int64_t>(i)) * width;
    return sums;
  };
  const at::Tensor parts =
      at::zeros({tasks, static_cast<int64_t>(kSums), width}, totals[0].options());
  at::parallel_for(
      0, tasks, 1 + kElementsOfATask / (1 + kRows * width), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const auto sums = sums_of(parts, task);
          for (int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row)
            body(row, sums);
        }
      });
  for (size_t i = 0; i < kSums; ++i) {
    Sum* total = data<Sum>(totals[i]);
    std::fill_n(total, width, Sum{0});
    for (int64_t task = 0; task < tasks; ++task) {
      const Sum* part = sums_of(parts, task)[i];
      for (int64_t c = 0; c < width; ++c) total[c] += part[c];
    }
  }
}

bool takes_bias_by_loops(const at::Tensor& bias, at::ScalarType of_product) {
  return bias.scalar_type() == sum_type(of_product);
}

void bias_relu_dropout_by_loops(const at::Tensor& product, const at::Tensor& bias,
                                const Dropping& dropping) {
  const int64_t width = product.size(1);
  TORCH_INTERNAL_ASSERT(dropping.rule.threshold == 0 || dropping.part.is_all() ||
                        dropping.part.size % width == 0);
  for_type("linear_relu_dropout", product, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    T* to = data<T>(product);
    const Sum* added = data<Sum>(bias);
    for_rows(product.size(0), width, [&](int64_t row) {
      const int64_t first = row * width;
      table.bias_relu_dropout(to + first, added, width, rule_from(dropping, first));
    });
  });
}

std::pair<at::Tensor, at::Tensor> bias_relu_dropout_backward_by_loops(const at::Tensor& out,
                                                                      const at::Tensor& grad,
                                                                      float scale) {
  const int64_t width = out.size(1);
  at::Tensor grad_x = at::empty_like(out);
  at::Tensor grad_bias = at::empty({width}, out.options().dtype(sum_type(out.scalar_type())));
  for_type("linear_relu_dropout", out, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    const T *from = data<T>(out), *slopes = data<T>(grad);
    T* to = data<T>(grad_x);
    sum_over_rows<Sum>(out.size(0), std::array{grad_bias},
                       [&](int64_t row, const std::array<Sum*, 1>& sums) {
                         const int64_t first = row * width;
                         table.bias_relu_dropout_backward(from + first, slopes + first, to + first,
                                                          sums[0], width, scale);
                       });
  });
  return {grad_x, grad_bias};
}

// Calls body(loops) for those that add `of_y` and write `type`.
template <class Body>
void for_norm(at::ScalarType of_y, at::ScalarType type, const Body& body) {
  if (of_y == at::kDouble) return body(loops().f64.norm);
  if (of_y == at::kFloat) return body(loops().f32.norm);
  TORCH_INTERNAL_ASSERT(of_y == at::kBFloat16);
  type == at::kBFloat16 ? body(loops().bf16.norm) : body(loops().bf16.wide_norm);
}

bool takes_norm_by_loops(const at::Tensor& x, const at::Tensor& y, const NormParameters& norm) {
  const auto wide = x.scalar_type();
  const auto of_y = y.defined() ? y.scalar_type() : norm.type;
  const bool known = of_y == at::kDouble || of_y == at::kFloat || of_y == at::kBFloat16;
  return known && sum_type(of_y) == wide && (norm.type == of_y || norm.type == wide) &&
         norm.weight_D.scalar_type() == wide && norm.bias_D.scalar_type() == wide;
}

NormKernels::Result norm_by_loops(const at::Tensor& x, const at::Tensor& y,
                                  const NormParameters& norm, const Dropping& dropping) {
  const int64_t width = x.size(-1), rows = width == 0 ? 0 : x.numel() / width;
  const NormKernels::Result result{.sum = y.defined() ? at::empty_like(x) : x,
                                   .normed = at::empty(x.sizes(), x.options().dtype(norm.type)),
                                   .stats = at::empty({rows, 2}, x.options())};
  for_norm(
      y.defined() ? y.scalar_type() : norm.type, norm.type,
      [&]<class Y, class Out>(const NormLoops<Y, Out>& table) {
        using Sum = typename NormLoops<Y, Out>::Sum;
        const NormWeights<Sum> weights{data<Sum>(norm.weight_D), data<Sum>(norm.bias_D), width};
        const Sum* from = data<Sum>(x);
        const Y* added = y.defined() ? data<Y>(y) : nullptr;
        Sum *sum = data<Sum>(result.sum), *stats = data<Sum>(result.stats);
        Out* normed = data<Out>(result.normed);
        for_rows(rows, width, [&](int64_t row) {
          const int64_t first = row * width;
          table.forward(from + first, added == nullptr ? nullptr : added + first,
                        rule_from(dropping, first), weights, sum + first, normed + first,
                        stats + 2 * row);
        });
      });
  return result;
}

NormKernels::Grads norm_backward_by_loops(const at::Tensor& sum, const at::Tensor& stats,
                                          const at::Tensor& weight, const at::Tensor& grad_sum,
                                          const at::Tensor& grad_normed,
                                          std::optional<at::ScalarType> type_of_y,
                                          const Dropping& dropping) {
  const int64_t width = weight.numel();
  const auto type = grad_normed.scalar_type();
  const NormKernels::Grads grads{
      .x = at::empty_like(sum),
      .y = type_of_y ? at::empty(sum.sizes(), sum.options().dtype(*type_of_y)) : at::Tensor(),
      .weight = at::empty_like(weight),
      .bias = at::empty_like(weight)};
  for_norm(type_of_y.value_or(type), type, [&]<class Y, class Out>(const NormLoops<Y, Out>& table) {
    using Sum = typename NormLoops<Y, Out>::Sum;
    const NormWeights<Sum> weights{data<Sum>(weight), nullptr, width};
    const Sum *from = data<Sum>(sum), *of_rows = data<Sum>(stats);
    const Sum* of_sum = grad_sum.defined() ? data<Sum>(grad_sum) : nullptr;
    const Out* of_normed = data<Out>(grad_normed);
    Sum* to_x = data<Sum>(grads.x);
    Y* to_y = grads.y.defined() ? data<Y>(grads.y) : nullptr;
    sum_over_rows<Sum>(stats.size(0), std::array{grads.weight, grads.bias},
                       [&](int64_t row, const std::array<Sum*, 2>& sums) {
                         const int64_t first = row * width;
                         table.backward(from + first, of_rows + 2 * row, weights,
                                        of_sum == nullptr ? nullptr : of_sum + first,
                                        of_normed + first, rule_from(dropping, first), to_x + first,
                                        to_y == nullptr ? nullptr : to_y + first, sums[0], sums[1]);
                       });
  });
  return grads;
}

// [B, T, D], or packed rows, as rows one after another.
at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 3 ? x.view({x.size(0) * x.size(1), x.size(2)}) : x;
}

// The rows of a sentence among all.
struct SentenceAt {
  int64_t first, rows;
};

// The sentences of one side. lengths: of packed rows; null: all have `longest` rows.
std::vector<SentenceAt> sentences_at(int64_t batch, const int64_t* lengths, int64_t longest) {
  std::vector<SentenceAt> sentences;
  int64_t first = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t rows = lengths == nullptr ? longest : lengths[b];
    sentences.push_back({first, rows});
    first += rows;
  }
  return sentences;
}

// Both sides of an attention. Heads are numbered b * heads + h.
struct AttentionSides {
  std::vector<SentenceAt> of_queries, of_keys;
  int64_t heads, queries, keys, width;  // queries, keys: of the longest

  AttentionSides(const AttentionOperands& operands, const SoftmaxMask& mask)
      : heads(operands.heads) {
    const at::Tensor &q = operands.q_BQD, &lengths_B = mask.key_lengths_B;
    const PackedSentences& packed = operands.packed;
    const bool is_packed = packed.query_lengths_B.defined();
    queries = is_packed ? packed.queries : q.size(1);
    keys = is_packed ? packed.keys : operands.k_BKD.size(1);
    width = q.size(-1) / heads;
    const auto lengths = [&](const at::Tensor& of_side) {
      return is_packed ? of_side.const_data_ptr<int64_t>() : nullptr;
    };
    of_queries = sentences_at(lengths_B.size(0), lengths(packed.query_lengths_B), queries);
    of_keys = sentences_at(lengths_B.size(0), lengths(lengths_B), keys);
  }

  // Of a side's rows.
  template <class T>
  T* head_of(const at::Tensor& x_ND, const std::vector<SentenceAt>& side, int64_t head) const {
    const SentenceAt& sentence = side[static_cast<size_t>(head / heads)];
    return data<T>(x_ND) + sentence.first * x_ND.stride(0) + head % heads * width;
  }
  // Of attention's stats.
  template <class Sum>
  Sum* stats_of(const at::Tensor& stats, int64_t head) const {
    return data<Sum>(stats) + head * queries * 2;
  }
};

// Calls body(table, the head's operands, what it drops, its scratch, its number) for each head.
template <class Body>
void for_heads(const AttentionOperands& operands, const AttentionSides& sides,
               const SoftmaxMask& mask, const Dropping& dropping, const Body& body) {
  const at::Tensor q = rows_of(operands.q_BQD), k = rows_of(operands.k_BKD),
                   v = rows_of(operands.v_BKD);
  const int64_t heads = sides.heads, batch = mask.key_lengths_B.size(0);
  const int64_t queries = sides.queries, keys = sides.keys, width = sides.width;
  const auto* lengths = mask.key_lengths_B.const_data_ptr<int64_t>();
  for_type("attention", q, [&]<class T>(const LoopsOf<T>& table, T*) {
    using Sum = typename LoopsOf<T>::Sum;
    constexpr int64_t kProductsOfATask = int64_t{1} << 20;
    at::parallel_for(0, batch * heads, 1 + kProductsOfATask / (1 + queries * keys * width),
                     [&](int64_t begin, int64_t end) {
                       at::Tensor scratch = at::empty(
                           {table.attention.scratch(keys, width)},
                           at::TensorOptions().dtype(c10::CppTypeToScalarType<Sum>::value));
                       for (int64_t i = begin; i < end; ++i) {
                         const auto b = static_cast<size_t>(i / heads);
                         body(table.attention,
                              AttentionHead<T>{.queries = sides.head_of<T>(q, sides.of_queries, i),
                                               .keys = sides.head_of<T>(k, sides.of_keys, i),
                                               .values = sides.head_of<T>(v, sides.of_keys, i),
                                               .query_stride = q.stride(0),
                                               .key_stride = k.stride(0),
                                               .num_queries = sides.of_queries[b].rows,
                                               .num_keys = lengths[b],
                                               .key_rows = sides.of_keys[b].rows,
                                               .all_keys = keys,
                                               .width = width,
                                               .causal = mask.causal,
                                               .next_behind = i % heads + 1 < heads,
                                               .scale = mask.scale},
                              rule_from(dropping, i * queries * keys), data<Sum>(scratch), i);
                       }
                     });
  });
}

std::pair<at::Tensor, at::Tensor> attention_by_loops(const AttentionOperands& operands,
                                                     const SoftmaxMask& mask,
                                                     const Dropping& dropping) {
  const at::Tensor& q = operands.q_BQD;
  const AttentionSides sides(operands, mask);
  const at::Tensor out = at::empty(q.sizes(), q.options()), out_ND = rows_of(out);
  const at::Tensor stats = at::empty({mask.key_lengths_B.size(0), sides.heads, sides.queries, 2},
                                     q.options().dtype(sum_type(q.scalar_type())));
  for_heads(operands, sides, mask, dropping,
            [&]<class T, class Sum>(const AttentionLoops<T>& loops, const AttentionHead<T>& head,
                                    const DropoutRule& rule, Sum* scratch, int64_t i) {
              loops.forward(head, rule, scratch, sides.head_of<T>(out_ND, sides.of_queries, i),
                            out_ND.stride(0), sides.stats_of<Sum>(stats, i));
            });
  return {out, stats};
}

void attention_backward_by_loops(const AttentionOperands& operands, const at::Tensor& /*out*/,
                                 const at::Tensor& stats, const at::Tensor& grad,
                                 const SoftmaxMask& mask, const Dropping& dropping,
                                 const AttentionOperands& grads) {
  const AttentionSides sides(operands, mask);
  const at::Tensor grad_ND = rows_of(grad), of_q = rows_of(grads.q_BQD),
                   of_k = rows_of(grads.k_BKD), of_v = rows_of(grads.v_BKD);
  for_heads(operands, sides, mask, dropping,
            [&]<class T, class Sum>(const AttentionLoops<T>& loops, const AttentionHead<T>& head,
                                    const DropoutRule& rule, Sum* scratch, int64_t i) {
              loops.backward(
                  head, rule, sides.stats_of<Sum>(stats, i),
                  sides.head_of<T>(grad_ND, sides.of_queries, i), grad_ND.stride(0), scratch,
                  AttentionHeadGrads<T>{.queries = sides.head_of<T>(of_q, sides.of_queries, i),
                                        .keys = sides.head_of<T>(of_k, sides.of_keys, i),
                                        .values = sides.head_of<T>(of_v, sides.of_keys, i)});
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
    .add_dropout = add_dropout_by_loops,
    .add_dropout_backward = add_dropout_backward_by_loops,
    .relu_dropout =
        [](const at::Tensor& x, const Dropping& dropping) {
          return run_loop("relu_dropout", x, dropping,
                          [](const auto& table) { return table.relu_dropout; });
        },
    .relu_dropout_backward = relu_backward_by_loops,
    .bias_relu_dropout = {.takes = takes_bias_by_loops,
                          .forward = bias_relu_dropout_by_loops,
                          .backward = bias_relu_dropout_backward_by_loops},
    .norm = {.takes = takes_norm_by_loops,
             .forward = norm_by_loops,
             .backward = norm_backward_by_loops},
    .gelu = activation_by_loops<GeluLoops>(),
    .swish = activation_by_loops<SwishLoops>(),
    .softmax = softmax_by_loops,
    .softmax_backward = softmax_backward_by_loops,
    .attention = {.takes_packed = true,
                  .forward = attention_by_loops,
                  .backward = attention_backward_by_loops},
    .product =
        [](const at::Tensor& a, const at::Tensor& b, const ProductOptions& options,
           at::Tensor& out) {
          if (!multiply_by_tiles(a, b, options.bias_M, options.add, out))
            kAtenKernels.product(a, b, options, out);
        },
    .cross_entropy = cross_entropy_by_loops};

}  // namespace cohort::nmt
