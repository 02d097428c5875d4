// SPDX-License-Identifier: Apache-2.0
// A training run on disk: a checkpoint with the optimizer's momentum beside the weights.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/strategy.h"
#include "cohort/train/checkpoint.h"

#include "examples/imagenet/resnet.h"

namespace imagenet {

using Model = cohort::parallel::ParallelModel<ResNet>;

/// Progress of a run.
struct RunState {
  std::string arch;
  int64_t epochs_done = 0;
  double best_top1 = -1;  ///< Percent; below 0: not evaluated yet.
  std::string servers;    ///< Where servers saved parameters and momentum; empty: no servers.
  double loss_scale = 0;  ///< Of float16; 0: another precision.
  int64_t scale_age = 0;  ///< Steps since an overflow or since the scale grew.
};

/// Writes weights, momentum (if it is not empty) and state to `folder`, each rank what it holds;
/// the manifest comes last, so an interrupted save leaves the previous checkpoint. Collective;
/// blocks until the disk has it.
/// Errors: ConfigError if the folder is not writable, c10::Error if writing fails.
void save_run(const std::string& folder, Model& model,
              const std::vector<cohort::train::TensorShard>& momentum, const RunState& state);

/// Whether `folder` holds a checkpoint that an earlier round of this job wrote: a launcher that
/// starts ranks again tells them which job they are of (COHORT_JOB_ID, COHORT_ROUND).
bool is_of_this_job(const std::string& folder);

/// Reads the state alone.
/// Errors: ConfigError if `folder` holds no checkpoint of this program, or one with a loss scale that no run has.
RunState read_run(const std::string& folder);

/// Fills what this rank holds, from a checkpoint of any strategy and number of ranks; every rank
/// reads the folder. Collective; blocks.
/// Errors: ConfigError with the file's name if it is corrupt or another model's.
void load_run(const std::string& folder, Model& model,
              const std::vector<cohort::train::TensorShard>& momentum,
              const cohort::comm::ProcessGroup& group);

/// Fills a plain model. Local.
/// Errors: as load_run.
void load_weights(const std::string& folder, ResNet& model);

}  // namespace imagenet
