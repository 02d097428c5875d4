// SPDX-License-Identifier: Apache-2.0
// Before a model is sharded: compares model and options between ranks, and broadcasts the state.
// For the sharding engine alone.
#pragma once
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/sharding/sharding_engine.h"

namespace cohort::parallel {

/// Broadcasts the state of rank 0 of the first replica to all ranks, except what `ignored` (full
/// names) lists and what lies on the meta device.
/// Collective over `group` and options.replicate_group; blocks.
/// Errors: c10::ValueError if models or options differ between ranks, or contradict.
void sync_initial_state(const torch::nn::Module& model, const comm::ProcessGroup& group,
                        const ShardingEngineOptions& options,
                        const std::vector<std::string>& ignored);

/// The neighbours of this rank among which a unit stays from its forward to its backward; null
/// where it stays among all of `group`, or with none. Collective; blocks.
comm::ProcessGroup make_reshard_group(const comm::ProcessGroup& group,
                                      const ShardingEngineOptions& options);

}  // namespace cohort::parallel
