// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/tensor_parallel_context.h"

#include <torch/types.h>
#include <utility>

#include "cohort/parallel/tensor_parallel.h"

namespace cohort::translate {
namespace {

class GroupContext : public nmt::TensorParallelContext {
 public:
  explicit GroupContext(const comm::ProcessGroup& group)
      : TensorParallelContext(group.rank(), group.size()), group_(group) {}

  at::Tensor copy_to_region(const at::Tensor& x) const override {
    return parallel::copy_to_group(x, group_);
  }
  at::Tensor reduce_from_region(const at::Tensor& x) const override {
    return parallel::reduce_from_group_(x, group_);
  }
  at::Tensor gather_from_region(const at::Tensor& columns, int64_t num_columns) const override {
    return parallel::gather_from_group(columns, num_columns, group_);
  }
  at::Tensor embed(const at::Tensor& table_VD, const at::Tensor& ids,
                   int64_t vocabulary) const override {
    return parallel::vocabulary_parallel_embedding(table_VD, ids, vocabulary, group_);
  }
  nmt::LossSums cross_entropy(const at::Tensor& hidden_ND, const at::Tensor& weight_VD,
                              const at::Tensor& labels_N, double smoothing,
                              int64_t vocabulary) const override {
    const auto sums = parallel::vocabulary_parallel_cross_entropy(hidden_ND, weight_VD, labels_N,
                                                                  smoothing, vocabulary, group_);
    return {sums.loss, sums.nll};
  }

 private:
  comm::ProcessGroup group_;
};

}  // namespace

std::shared_ptr<const nmt::TensorParallelContext> make_tensor_parallel_context(
    const comm::ProcessGroup& group) {
  return std::make_shared<GroupContext>(group);
}

parallel::TensorParallelPlan tensor_parallel_plan(const nmt::TransformerImpl& model) {
  parallel::TensorParallelPlan plan;
  for (const auto& item : model.named_parameters()) {
    const TensorPart part = nmt::part_of(item.key(), item.value().sizes().vec(), model.options(),
                                         *model.tensor_parallel());
    if (!part.is_whole()) plan[item.key()] = {.dim = part.dim, .blocks = std::ssize(part.pieces)};
  }
  return plan;
}

}  // namespace cohort::translate
