// SPDX-License-Identifier: Apache-2.0
// Statistics of a batch that lies on several ranks, for batch normalisation. C channels.
#pragma once
#include <ATen/core/Tensor.h>
#include <optional>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// Over all ranks, per channel, float64.
struct BatchStatistics {
  at::Tensor count;  ///< [1]
  at::Tensor mean;   ///< [C]
  at::Tensor m2;     ///< [C], sum of squared differences from the mean
};

/// From each rank's [mean | m2 | count], float64 [2 C + 1], zeros for an empty batch. Collective.
BatchStatistics combined_statistics(const at::Tensor& local, const comm::ProcessGroup& group);

/// Moves running statistics towards the batch's by `momentum`; the variance is unbiased.
void update_running_statistics(at::Tensor running_mean, at::Tensor running_var,
                               const BatchStatistics& statistics, double momentum);

/// Returns the group that convert_sync_batchnorm has given the module with this running mean; null: none.
const comm::ProcessGroup* batch_norm_group(const std::optional<at::Tensor>& running_mean);

}  // namespace cohort::parallel
