// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/metrics.h"

#include <array>
#include <limits>
#include <torch/types.h>

namespace cohort::train {
namespace {

double quotient(double sum, double count) {
  return count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

std::vector<double> reduce_sums(const comm::ProcessGroup& group, std::span<const double> values,
                                CallSite site) {
  at::Tensor sums = torch::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  auto* data = sums.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data);
  if (!values.empty()) group.all_reduce(sums, comm::ReduceOp::kSum, site);
  return {data, data + values.size()};
}

void MeanMetric::add(double mean, int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "MeanMetric: expected count >= 0, got ", count);
  if (count == 0) return;
  sum_ += mean * static_cast<double>(count);
  count_ += count;
}

void MeanMetric::add(const at::Tensor& values) {
  sum_ += values.detach().to(at::kDouble).sum().item<double>();
  count_ += values.numel();
}

double MeanMetric::local_mean() const {
  return quotient(sum_, static_cast<double>(count_));
}

double MeanMetric::mean(const comm::ProcessGroup& group, CallSite site) const {
  const auto sums = reduce_sums(group, std::array{sum_, static_cast<double>(count_)}, site);
  return quotient(sums[0], sums[1]);
}

at::Tensor top_k_hits(const at::Tensor& scores_BC, const at::Tensor& labels_B, int64_t k) {
  TORCH_CHECK_VALUE(scores_BC.dim() == 2 && labels_B.dim() == 1 &&
                        labels_B.size(0) == scores_BC.size(0) && k >= 1,
                    "top_k: expected scores [B, C], labels [B] and k >= 1, got ", scores_BC.sizes(),
                    ", ", labels_B.sizes(), " and ", k);
  const at::Tensor scores = scores_BC.detach();
  const at::Tensor labels_B1 = labels_B.unsqueeze(1);
  const at::Tensor own_B1 = scores.gather(1, labels_B1);
  const at::Tensor classes_C = torch::arange(scores.size(1), labels_B.options());
  const at::Tensor before_BC = (scores > own_B1) | ((scores == own_B1) & (classes_C < labels_B1));
  const at::Tensor among_B = before_BC.sum(1) < k;
  return (among_B & ~own_B1.squeeze(1).isnan()).sum();
}

int64_t count_top_k(const at::Tensor& scores_BC, const at::Tensor& labels_B, int64_t k) {
  return top_k_hits(scores_BC, labels_B, k).item<int64_t>();
}

}  // namespace cohort::train
