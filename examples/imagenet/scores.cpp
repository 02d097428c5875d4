// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/scores.h"

#include <cmath>
#include <span>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include "cohort/train/metrics.h"

namespace imagenet {
namespace {

Scores scores_of(std::span<const double> sums) {
  const double count = sums[3];
  return {.count = std::llround(count),
          .loss = sums[0] / count,
          .top1 = 100 * sums[1] / count,
          .top5 = 100 * sums[2] / count};
}

}  // namespace

at::Tensor losses_of(const at::Tensor& scores_BC, const at::Tensor& labels_B) {
  return torch::nn::functional::cross_entropy(
      scores_BC, labels_B,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
}

void ScoreSums::add(const at::Tensor& losses_B, const at::Tensor& scores_BC,
                    const at::Tensor& labels_B) {
  const at::Tensor sums =
      at::stack({losses_B.detach().to(at::kDouble).sum(),
                 cohort::train::top_k_hits(scores_BC, labels_B, 1).to(at::kDouble),
                 cohort::train::top_k_hits(scores_BC, labels_B, 5).to(at::kDouble)});
  sums_ = sums_.defined() ? sums_ + sums : sums;
  count_ += labels_B.size(0);
}

std::array<double, 4> ScoreSums::sums() const {
  if (count_ == 0) return {};
  const at::Tensor here = sums_.cpu();
  const double* sums = here.const_data_ptr<double>();
  return {sums[0], sums[1], sums[2], static_cast<double>(count_)};
}

Scores ScoreSums::scores() const {
  return scores_of(sums());
}

Scores ScoreSums::scores(const cohort::comm::ProcessGroup& group) const {
  return scores_of(cohort::train::reduce_sums(group, sums()));
}

}  // namespace imagenet
