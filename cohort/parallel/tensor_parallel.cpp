// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/tensor_parallel.h"

#include <algorithm>
#include <optional>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include "cohort/base/tensor_part.h"
#include "cohort/parallel/model_state.h"
#include "cohort/parallel/saved_group.h"

namespace cohort::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A copy: what autograd hands over may be somebody else's, too.
at::Tensor sum_over(const at::Tensor& x, const comm::ProcessGroup& group) {
  at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum);
  return sum;
}

ElementRange own_cut(int64_t size, const comm::ProcessGroup& group) {
  return cut_of(size, group.rank(), group.size());
}

void check_rows(const char* what, const at::Tensor& part, int64_t vocabulary,
                const comm::ProcessGroup& group) {
  const auto [begin, end] = own_cut(vocabulary, group);
  TORCH_CHECK_VALUE(part.dim() == 2 && part.size(0) == end - begin && begin < end, what,
                    ": expected rows ", begin, " to ", end, " of ", vocabulary, " on rank ",
                    group.rank(), " of ", group.size(), ", got ", part.sizes());
}

struct CopyToGroup : torch::autograd::Function<CopyToGroup> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const comm::ProcessGroup& group) {
    save_group(context, group);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {sum_over(grads[0], saved_group(context)), at::Tensor()};
  }
};

struct ReduceFromGroup : torch::autograd::Function<ReduceFromGroup> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x,
                            const comm::ProcessGroup& group) {
    return sum_over(x, group);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

struct ReduceInPlace : torch::autograd::Function<ReduceInPlace> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x,
                            const comm::ProcessGroup& group) {
    x.unsafeGetTensorImpl()->bump_version();  // A backward that saved x is autograd's error.
    return group.all_reduce(alias_of(x));
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

struct GatherFromGroup : torch::autograd::Function<GatherFromGroup> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t num_columns,
                            const comm::ProcessGroup& group) {
    const auto [begin, end] = own_cut(num_columns, group);
    context->saved_data["begin"] = begin;
    context->saved_data["end"] = end;
    // Cuts differ by one column at most; those that are sent do not.
    const int64_t most = (num_columns + group.size() - 1) / group.size();
    const auto all = group.all_gather(at::constant_pad_nd(x, {0, most - (end - begin)}));
    variable_list columns;
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto [first, last] = cut_of(num_columns, rank, group.size());
      columns.push_back(all[static_cast<size_t>(rank)].narrow(-1, 0, last - first));
    }
    return at::cat(columns, -1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const int64_t begin = context->saved_data["begin"].toInt();
    const int64_t end = context->saved_data["end"].toInt();
    return {grads[0].narrow(-1, begin, end - begin), at::Tensor(), at::Tensor()};
  }
};

constexpr int64_t kChunkRows = 1024;

// The softmax of rows whose columns are on several ranks.
struct RowSums {
  at::Tensor log_norm;  // log of the sum of exponentials
  at::Tensor total;     // sum of the scores
  at::Tensor at_label;  // the label's score
};

// `scores` [rows, own columns]; `label` the label's column here, where `is_mine`.
RowSums sum_rows(const at::Tensor& scores, const at::Tensor& label, const at::Tensor& is_mine,
                 const comm::ProcessGroup& group) {
  const at::Tensor top = at::amax(scores, 1);
  const at::Tensor exponentials = at::exp(scores - top.unsqueeze(1)).sum(1);
  const at::Tensor at_label = scores.gather(1, label.unsqueeze(1)).squeeze(1) * is_mine;
  const at::Tensor own = at::stack({top, exponentials, scores.sum(1), at_label});
  at::Tensor all = at::empty({group.size(), own.size(0), own.size(1)}, own.options());
  group.all_gather_into(all, own);
  const at::Tensor tops = all.select(1, 0);
  const at::Tensor greatest = at::amax(tops, 0);
  const at::Tensor sums = all.sum(0);
  return {.log_norm = at::log((all.select(1, 1) * at::exp(tops - greatest)).sum(0)) + greatest,
          .total = sums[2],
          .at_label = sums[3]};
}

// Returns {loss, nll}; leaves gradients for a loss weight of 1 in the context.
struct VocabularyCrossEntropy : torch::autograd::Function<VocabularyCrossEntropy> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const at::Tensor& labels, double smoothing,
                               int64_t vocabulary, bool with_gradient,
                               const comm::ProcessGroup& group) {
    const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor w = weight.to(hidden.scalar_type());
    const auto [begin, end] = own_cut(vocabulary, group);
    const double uniform = smoothing / static_cast<double>(vocabulary);
    at::Tensor grad_hidden, grad_weight;
    if (with_gradient) {
      grad_hidden = at::empty_like(hidden);
      grad_weight = at::zeros(w.sizes(), w.options().dtype(wide));
    }
    // On hidden's device: nothing waits for the sums.
    at::Tensor nll = at::zeros({}, hidden.options().dtype(at::kDouble));
    at::Tensor loss = nll.clone();
    for (int64_t first = 0; first < hidden.size(0); first += kChunkRows) {
      const int64_t rows = std::min(kChunkRows, hidden.size(0) - first);
      const at::Tensor h = hidden.narrow(0, first, rows);
      const at::Tensor chosen = labels.narrow(0, first, rows);
      const at::Tensor is_mine = at::logical_and(chosen >= begin, chosen < end);
      const at::Tensor label = (chosen - begin) * is_mine;
      at::Tensor scores = at::mm(h, w.t()).to(wide);
      const RowSums sums = sum_rows(scores, label, is_mine, group);
      const at::Tensor nlls = (sums.log_norm - sums.at_label).to(at::kDouble);
      const at::Tensor means =
          sums.log_norm.to(at::kDouble) * smoothing - sums.total.to(at::kDouble) * uniform;
      const at::Tensor own_nll = nlls.sum();
      nll.add_(own_nll);
      loss.add_((own_nll * (1 - smoothing)).add_(means.sum()));
      if (!with_gradient) continue;
      scores.sub_(sums.log_norm.unsqueeze(1)).exp_().sub_(uniform);
      const at::Tensor one = is_mine.to(wide).mul_(smoothing - 1);
      scores.scatter_add_(1, label.unsqueeze(1), one.unsqueeze(1));
      const at::Tensor grad_scores = scores.to(h.scalar_type());
      at::Tensor grad_h = grad_hidden.narrow(0, first, rows);
      at::mm_out(grad_h, grad_scores, w);
      grad_weight.add_(at::mm(grad_scores.t(), h));
    }
    if (with_gradient) {
      if (hidden.size(0) > 0) group.all_reduce(grad_hidden);
      context->saved_data["grad_hidden"] = grad_hidden;
      context->saved_data["grad_weight"] = grad_weight;
    }
    context->mark_non_differentiable({nll});
    return {loss.to(wide), nll};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    // Once: the gradients are scaled in place and given away.
    at::Tensor grad_hidden = context->saved_data["grad_hidden"].toTensor();
    at::Tensor grad_weight = context->saved_data["grad_weight"].toTensor();
    context->saved_data.clear();
    const at::Tensor& factor = grads[0];
    if (!factor.is_cpu()) {
      grad_hidden.copy_(grad_hidden.to(factor.scalar_type()).mul_(factor));
      grad_weight.mul_(factor);
    } else if (const double value = factor.item<double>(); value != 1) {
      grad_hidden.mul_(value);
      grad_weight.mul_(value);
    }
    return {grad_hidden,  grad_weight,  at::Tensor(), at::Tensor(),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

at::Tensor copy_to_group(const at::Tensor& x, const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  return CopyToGroup::apply(x, group);
}

at::Tensor reduce_from_group(const at::Tensor& x, const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  return ReduceFromGroup::apply(x, group);
}

at::Tensor reduce_from_group_(const at::Tensor& x, const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  return ReduceInPlace::apply(x, group);
}

at::Tensor gather_from_group(const at::Tensor& x, int64_t num_columns,
                             const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  const auto [begin, end] = own_cut(num_columns, group);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == end - begin,
                    "gather_from_group: expected columns ", begin, " to ", end, " of ", num_columns,
                    " on rank ", group.rank(), " of ", group.size(), ", got ", x.sizes());
  return GatherFromGroup::apply(x, num_columns, group);
}

at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& bias, const comm::ProcessGroup& group,
                                  CallSite site) {
  const CallSiteScope scope(site);
  return at::linear(copy_to_group(x, group), weight, optional(bias));
}

at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const comm::ProcessGroup& group,
                               CallSite site) {
  const CallSiteScope scope(site);
  const at::Tensor sum = reduce_from_group_(at::linear(x, weight), group);
  return bias.defined() ? sum + bias : sum;
}

at::Tensor vocabulary_parallel_embedding(const at::Tensor& table, const at::Tensor& ids,
                                         int64_t vocabulary, const comm::ProcessGroup& group,
                                         CallSite site) {
  const CallSiteScope scope(site);
  check_rows("vocabulary_parallel_embedding", table, vocabulary, group);
  const auto [begin, end] = own_cut(vocabulary, group);
  const at::Tensor is_mine = at::logical_and(ids >= begin, ids < end);
  at::Tensor rows = at::embedding(table, (ids - begin) * is_mine);
  return reduce_from_group_(rows.masked_fill_(is_mine.logical_not().unsqueeze(-1), 0), group);
}

VocabularyLoss vocabulary_parallel_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                                 const at::Tensor& labels, double smoothing,
                                                 int64_t vocabulary,
                                                 const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  check_rows("vocabulary_parallel_cross_entropy", weight, vocabulary, group);
  TORCH_CHECK_VALUE(hidden.dim() == 2 && hidden.size(1) == weight.size(1) && labels.dim() == 1 &&
                        labels.size(0) == hidden.size(0) && labels.dtype() == at::kLong,
                    "vocabulary_parallel_cross_entropy: expected hidden [N, D], weight [V, D], "
                    "int64 labels [N], got ",
                    hidden.sizes(), ", ", weight.sizes(), ", ", labels.sizes());
  const bool with_gradient =
      at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad());
  const variable_list sums = VocabularyCrossEntropy::apply(
      hidden.contiguous(), weight, labels, smoothing, vocabulary, with_gradient, group);
  return {sums[0], sums[1]};
}

}  // namespace cohort::parallel
