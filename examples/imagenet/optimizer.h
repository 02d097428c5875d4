// SPDX-License-Identifier: Apache-2.0
// What turns gradients into updates: SGD on the ranks, or parameter servers.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/train/checkpoint.h"

#include "examples/imagenet/checkpoint.h"
#include "examples/imagenet/optimizer_options.h"
#include "examples/imagenet/options.h"

namespace imagenet {

/// SGD with momentum and weight decay; the learning rate falls to a tenth every 30 epochs.
///
/// Collective: all but begin_epoch and momentum.
/// Threads:    one.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// Before the steps of an epoch.
  virtual void begin_epoch(int64_t epoch) = 0;
  /// Updates the model's parameters by their gradients, and clears these. Servers: the parameters
  /// are then up to date; with ps-async, up to the pushes that have arrived.
  virtual void step() = 0;
  /// All ranks hold the same parameters after it, until the next step. Blocks.
  virtual void wait_for_updates() = 0;
  /// To be saved beside the weights, and filled from there; empty if servers hold it.
  virtual std::vector<cohort::train::TensorShard> momentum() = 0;
  /// Saves what is on servers for a checkpoint of `state`, and records in it where. Blocks.
  virtual void save(RunState& state) = 0;
  /// Call when the checkpoint of the last save is complete: removes what earlier ones needed. Local.
  virtual void saved(const RunState& state) = 0;
  /// After the weights of `checkpoint` were loaded.
  /// Errors: ConfigError if it does not fit the servers' part.
  virtual void check_resumed(const std::string& checkpoint, const RunState& state) = 0;
  /// At the end of the run.
  virtual void finish() = 0;
};

/// torch's SGD on each rank's shard. `model` must outlive it.
std::unique_ptr<Optimizer> make_rank_optimizer(Model& model, const OptimizerOptions& options);

/// Servers hold the parameters: every rank's gradient goes there as it is, and `model`, which is
/// that of ddp, no longer averages them. Weight decay is added to gradients on the ranks. Begins
/// with rank 0's parameters; where `state` names a checkpoint of servers, they go back to that.
/// Collective; blocks. `model` must outlive it.
/// Errors: ConfigError: options that servers cannot follow; as ps::Session's.
std::unique_ptr<Optimizer> make_server_optimizer(Model& model,
                                                 const cohort::comm::ProcessGroup& group,
                                                 const Options& options,
                                                 const OptimizerOptions& optimizer,
                                                 const RunState& state);

}  // namespace imagenet
