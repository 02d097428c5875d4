// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/tensor_parallel_context.h"

#include <torch/types.h>

namespace cohort::nmt {

at::Tensor TensorParallelContext::gather_from_region(const at::Tensor& columns,
                                                     int64_t num_columns) const {
  TORCH_INTERNAL_ASSERT(columns.size(-1) == num_columns);
  return columns;
}

at::Tensor TensorParallelContext::embed(const at::Tensor& table_VD, const at::Tensor& ids,
                                        int64_t vocabulary) const {
  TORCH_INTERNAL_ASSERT(table_VD.size(0) == vocabulary);
  return nmt::embedding(table_VD, ids);
}

LossSums TensorParallelContext::cross_entropy(const at::Tensor& hidden_ND,
                                              const at::Tensor& weight_VD,
                                              const at::Tensor& labels_N, double smoothing,
                                              int64_t vocabulary) const {
  TORCH_INTERNAL_ASSERT(weight_VD.size(0) == vocabulary);
  return smoothed_cross_entropy(hidden_ND, weight_VD, labels_N, smoothing);
}

}  // namespace cohort::nmt
