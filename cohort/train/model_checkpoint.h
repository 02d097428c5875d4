// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a wrapped model and its optimizer: what a training program calls.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/nn/module.h>
#include <type_traits>
#include <variant>
#include <vector>

#include "cohort/optim/adam.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/zero_redundancy_optimizer.h"
#include "cohort/train/checkpoint.h"
#include "cohort/train/sharded_checkpoint.h"
#include "cohort/train/tensor_shard.h"

namespace torch::optim {
class Optimizer;
}

namespace cohort::checkpoint {

using train::IncompatibleKeys;
using train::LoadOptions;

struct SaveOptions {
  /// What train::read_update returns, and files are numbered by. Empty: the number of steps of an
  /// optim::Adam, for which it must not be another one; else 0.
  std::optional<int64_t> step;
  train::Metadata metadata{};  ///< Rank 0's, for train::read_manifest.
};

/// A save in the background. Movable; one at a time for each folder. Without wait() it is lost: the
/// checkpoint before stays. The destructor then waits until this rank has written, and warns.
class [[nodiscard]] SaveHandle {
 public:
  explicit SaveHandle(std::unique_ptr<train::ShardedCheckpointWriter> writer)
      : writer_(std::move(writer)) {}
  ~SaveHandle() { drop(); }
  SaveHandle(SaveHandle&&) noexcept = default;
  SaveHandle& operator=(SaveHandle&& other) noexcept {
    drop();
    writer_ = std::move(other.writer_);
    return *this;
  }

  /// Whether this rank has written its part: wait() then blocks for the other ranks alone. Local.
  bool done() const { return !writer_ || writer_->done(); }
  /// Makes it the folder's checkpoint. Returns at once if it is that already. Collective; blocks.
  /// Errors: the same on every rank, as ShardedCheckpointWriter::commit.
  void wait();

 private:
  void drop();

  std::unique_ptr<train::ShardedCheckpointWriter> writer_;  // Null: there is nothing to wait for.
};

/// What a rank holds of a model, for save and load. Not a template.
struct ModelState {
  parallel::ModelRanks ranks;
  bool saves = true;  ///< Whether this rank writes; the others have the same as one that does.
  std::vector<train::TensorShard> to_save, to_load;
  std::vector<train::TensorShard> trained;  ///< What the optimizer may update.
};

template <class Holder>
ModelState state_of(parallel::DistributedDataParallel<Holder>& model) {
  const auto state = parallel::whole_state_of(*model.module());
  return {model.ranks(), model.engine().group().rank() == 0, state, state,
          parallel::full_shards_of(*model.module())};
}

template <class Holder>
ModelState state_of(parallel::FullyShardedDataParallel<Holder>& model) {
  const parallel::ShardingEngine& engine = model.engine();
  return {model.ranks(), engine.is_first_replica(), engine.state_to_save(), engine.state_to_load(),
          engine.local_shards()};
}

template <class Holder>
ModelState state_of(parallel::ParallelModel<Holder>& model) {
  return {model.ranks(), static_cast<bool>(model.checkpoint_writers()), model.state_to_save(),
          model.state_to_load(), model.local_shards()};
}

/// An optimizer, and what of the model's parameters its tensors are.
struct OptimizerState {
  std::variant<std::monostate, optim::Adam*, torch::optim::Optimizer*> optimizer{};
  bool saves = true;
  std::vector<train::TensorShard> parameters{};
};

inline OptimizerState state_of(optim::Adam& optimizer, const ModelState& model) {
  return {&optimizer, model.saves, model.trained};
}
inline OptimizerState state_of(torch::optim::Optimizer& optimizer, const ModelState& model) {
  return {&optimizer, model.saves, model.trained};
}
template <class Optimizer>
OptimizerState state_of(parallel::ZeroRedundancyOptimizer<Optimizer>& optimizer,
                        const ModelState&) {
  return {&optimizer.optimizer(), true, optimizer.local_shards()};
}

/// What is no path, for overloads without an optimizer.
template <class T>
concept IsOptimizer = !std::is_convertible_v<T&, std::string>;

void save_state(const ModelState& model, const OptimizerState& optimizer, const std::string& folder,
                const SaveOptions& options);
SaveHandle async_save_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& folder, const SaveOptions& options);
IncompatibleKeys load_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& path, const LoadOptions& options);

/// Saves a model in DistributedDataParallel, FullyShardedDataParallel or ParallelModel and its
/// optimizer: optim::Adam; torch::optim's SGD, Adam, AdamW, RMSprop or Adagrad; or
/// ZeroRedundancyOptimizer of one of these. Any wrapper with the same kind of optimizer loads it,
/// on any number of ranks. Of a tensor-parallel model it is the plain model's, too: the wrapper's
/// tensor_parallel says how parts make whole tensors, and how a load cuts them.
///
/// The parts are "weights" and "optimizer": state by parameter, as "<parameter>.exp_avg", and where
/// there is a counter for each parameter, "<parameter>.step". Learning rates and other options of
/// an optimizer are not in it.
///
/// Collective over the model's ranks; blocks.
/// Errors: c10::ValueError for another optimizer, or one that updates other tensors than the
///         model's; else as ShardedCheckpointWriter::commit.
template <class Model, IsOptimizer Optimizer>
void save(Model& model, Optimizer& optimizer, const std::string& folder,
          const SaveOptions& options = {}) {
  const ModelState state = state_of(model);
  save_state(state, state_of(optimizer, state), folder, options);
}
/// The same of the weights alone.
template <class Model>
void save(Model& model, const std::string& folder, const SaveOptions& options = {}) {
  save_state(state_of(model), {}, folder, options);
}

/// The same in the background: wait() on the handle makes the checkpoint.
/// Local; blocks for the copying.
/// Memory: a copy of what this rank writes.
template <class Model, IsOptimizer Optimizer>
SaveHandle async_save(Model& model, Optimizer& optimizer, const std::string& folder,
                      const SaveOptions& options = {}) {
  const ModelState state = state_of(model);
  return async_save_state(state, state_of(optimizer, state), folder, options);
}
template <class Model>
SaveHandle async_save(Model& model, const std::string& folder, const SaveOptions& options = {}) {
  return async_save_state(state_of(model), {}, folder, options);
}

/// Loads what save() wrote, or train::save_checkpoint of the same parts. Optimizer state that the
/// checkpoint does not have, because its parameter had no gradient yet, is removed.
///
/// Collective over the model's ranks; blocks.
/// Errors: the same on every rank, as train::load_shards; c10::ValueError as save(). Nothing has
///         changed then.
template <class Model, IsOptimizer Optimizer>
IncompatibleKeys load(Model& model, Optimizer& optimizer, const std::string& path,
                      const LoadOptions& options = {}) {
  const ModelState state = state_of(model);
  return load_state(state, state_of(optimizer, state), path, options);
}
/// The same of the weights alone: also what other programs wrote (train::load_checkpoint).
template <class Model>
IncompatibleKeys load(Model& model, const std::string& path, const LoadOptions& options = {}) {
  return load_state(state_of(model), {}, path, options);
}

}  // namespace cohort::checkpoint
