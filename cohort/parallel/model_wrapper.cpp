#include "cohort/parallel/model_wrapper.h"

#include <c10/util/Exception.h>

namespace cohort::parallel {

NoSync::NoSync(const ModelWrapper& model)
    : engine_(model.engine().shared_from_this()), before_(engine_->set_synchronized(false)) {}

Unsharded::Unsharded(const ModelWrapper& model, const UnshardedOptions& options)
    : engine_(model.engine().shared_from_this()), options_(options) {
  engine_->unshard();
}

std::vector<at::Tensor> ModelWrapper::parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_parameters()) tensors.push_back(tensor);
  return tensors;
}

ModelEngine& ModelWrapper::engine() const {
  TORCH_CHECK_VALUE(engine_, "the wrapper of a model is used after it was moved from");
  return *engine_;
}

}  // namespace cohort::parallel
