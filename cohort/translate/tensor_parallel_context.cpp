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
    return parallel::reduce_from_group(x, group_);
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

// "a.weight" of itself and of "a.weight.exp_avg".
std::string parameter_of(const nmt::TransformerImpl& model, const std::string& name) {
  const auto parameters = model.named_parameters();
  for (size_t end = name.size(); end != std::string::npos; end = name.rfind('.', end - 1))
    if (parameters.contains(name.substr(0, end))) return name.substr(0, end);
  TORCH_CHECK_VALUE(false, "tensor-parallel shards: expected those of the model's parameters, got ",
                    name);
}

}  // namespace

std::shared_ptr<const nmt::TensorParallelContext> make_tensor_parallel_context(
    const comm::ProcessGroup& group) {
  return std::make_shared<GroupContext>(group);
}

bool is_partitioned(const nmt::TransformerImpl& model, const std::string& parameter,
                    const std::vector<int64_t>& shape) {
  return !nmt::part_of(parameter, shape, model.options(), *model.tensor_parallel()).is_whole();
}

std::vector<train::TensorShard> full_model_shards(const nmt::TransformerImpl& model,
                                                  const std::vector<train::TensorShard>& shards,
                                                  Replicated replicated) {
  std::vector<train::TensorShard> result;
  for (const train::TensorShard& shard : shards) {
    const TensorPart part = nmt::part_of(parameter_of(model, shard.name), shard.shape,
                                         model.options(), *model.tensor_parallel());
    TORCH_CHECK_VALUE(shard.shape == part.part_shape() && shard.tensor.is_contiguous(),
                      "tensor-parallel shards: expected contiguous ones of the shard's shape: ",
                      shard.name, ", shape ", to_string(shard.shape));
    const at::Tensor elements = shard.tensor.detach().view(-1);
    ElementRange wanted{shard.begin, shard.end};
    if (part.is_whole() && replicated == Replicated::kOnce) {
      const ElementRange own = model.tensor_parallel()->shard_range(shard.end - shard.begin);
      wanted = {shard.begin + own.begin, shard.begin + own.end};
    }
    for (const PartRun& run : part.runs(wanted)) {
      result.push_back(
          {shard.name, part.shape, run.whole.begin, run.whole.end,
           elements.narrow(0, run.part_begin - shard.begin, run.whole.end - run.whole.begin)});
    }
  }
  return result;
}

}  // namespace cohort::translate
