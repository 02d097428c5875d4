#include "cohort/translate/model_division.h"

#include <torch/types.h>
#include <utility>

#include "cohort/parallel/tensor_parallel.h"

namespace cohort::translate {
namespace {

class TensorParallel : public nmt::Division {
 public:
  explicit TensorParallel(const comm::ProcessGroup& group)
      : Division(group.rank(), group.size()), group_(group) {}

  at::Tensor enter(const at::Tensor& x) const override {
    return parallel::copy_to_group(x, group_);
  }
  at::Tensor leave(const at::Tensor& x) const override {
    return parallel::reduce_from_group(x, group_);
  }
  at::Tensor join(const at::Tensor& columns, int64_t num_columns) const override {
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
  TORCH_CHECK_VALUE(false, "slices of a part: expected those of the model's parameters, got ",
                    name);
}

}  // namespace

std::shared_ptr<const nmt::Division> divide_among(const comm::ProcessGroup& group) {
  return std::make_shared<TensorParallel>(group);
}

bool is_divided(const nmt::TransformerImpl& model, const std::string& parameter,
                const std::vector<int64_t>& shape) {
  return !nmt::part_of(parameter, shape, model.options(), *model.division()).is_whole();
}

std::vector<train::TensorSlice> whole_model_slices(const nmt::TransformerImpl& model,
                                                   const std::vector<train::TensorSlice>& slices,
                                                   Replicated replicated) {
  std::vector<train::TensorSlice> result;
  for (const train::TensorSlice& slice : slices) {
    const TensorPart part = nmt::part_of(parameter_of(model, slice.name), slice.shape,
                                         model.options(), *model.division());
    TORCH_CHECK_VALUE(slice.shape == part.part_shape() && slice.tensor.is_contiguous(),
                      "slices of a part: expected contiguous ones of the part's shape: ",
                      slice.name, ", shape ", to_string(slice.shape));
    const at::Tensor elements = slice.tensor.detach().view(-1);
    ElementRange wanted{slice.begin, slice.end};
    if (part.is_whole() && replicated == Replicated::kOnce) {
      const ElementRange own = model.division()->cut(slice.end - slice.begin);
      wanted = {slice.begin + own.begin, slice.begin + own.end};
    }
    for (const PartRun& run : part.runs(wanted)) {
      result.push_back(
          {slice.name, part.shape, run.whole.begin, run.whole.end,
           elements.narrow(0, run.part_begin - slice.begin, run.whole.end - run.whole.begin)});
    }
  }
  return result;
}

}  // namespace cohort::translate
