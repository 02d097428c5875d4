// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/scores.h"

#include <array>
#include <cmath>
#include <torch/nn/functional/loss.h>

#include "cohort/train/metrics.h"

namespace imagenet {

at::Tensor losses_of(const at::Tensor& scores_BC, const at::Tensor& labels_B) {
  return torch::nn::functional::cross_entropy(
      scores_BC, labels_B,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
}

void ScoreSums::add(const at::Tensor& losses_B, const at::Tensor& scores_BC,
                    const at::Tensor& labels_B) {
  loss_ += losses_B.detach().to(at::kDouble).sum().item<double>();
  top1_ += static_cast<double>(cohort::train::count_top_k(scores_BC, labels_B, 1));
  top5_ += static_cast<double>(cohort::train::count_top_k(scores_BC, labels_B, 5));
  count_ += static_cast<double>(labels_B.size(0));
}

Scores ScoreSums::scores() const {
  return {.count = std::llround(count_),
          .loss = loss_ / count_,
          .top1 = 100 * top1_ / count_,
          .top5 = 100 * top5_ / count_};
}

Scores ScoreSums::scores(const cohort::comm::ProcessGroup& group) const {
  const auto all = cohort::train::reduce_sums(group, std::array{loss_, top1_, top5_, count_});
  ScoreSums sums;
  sums.loss_ = all[0];
  sums.top1_ = all[1];
  sums.top5_ = all[2];
  sums.count_ = all[3];
  return sums.scores();
}

}  // namespace imagenet
