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
  /// What train::read_update returns, and files are numbered by; >= 0. Empty: the number of steps of
  /// an optim::Adam, for which it must not be another one; else 0.
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
  void wait(CallSite site = CallSite::here());

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
  bool shows_copies = false;  ///< As ModelEngine::shows_copies: nothing is loaded then.
};

template <class Holder>
ModelState state_of(const parallel::DistributedDataParallel<Holder>& model) {
  const auto state = parallel::whole_state_of(model);
  return {model.ranks(), model.engine().group().rank() == 0, state, state,
          parallel::full_shards_of(*model.module())};
}

template <class Holder>
ModelState state_of(const parallel::FullyShardedDataParallel<Holder>& model) {
  const parallel::ShardingEngine& engine = model.engine();
  return {model.ranks(),          engine.is_first_replica(), engine.state_to_save(),
          engine.state_to_load(), engine.local_shards(),     engine.shows_copies()};
}

template <class Holder>
ModelState state_of(const parallel::ParallelModel<Holder>& model) {
  return {model.ranks(),         static_cast<bool>(model.checkpoint_writers()),
          model.state_to_save(), model.state_to_load(),
          model.local_shards(),  model.engine().shows_copies()};
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

// Constants, not concepts: of a concept that is not met the compiler prints six lines more.
template <class T>
inline constexpr bool kIsModel = requires(const T& model) {
  state_of(model);
};
template <class T>
inline constexpr bool kIsSaved = requires(T& optimizer, const ModelState& model) {
  state_of(optimizer, model);
};

/// The states of what save and load are given, or a sentence from the compiler.
template <class Model>
ModelState state_to_keep(const Model& model) {
  static_assert(kIsModel<Model>,
                "checkpoint: expected a model in DistributedDataParallel, FullyShardedDataParallel "
                "or ParallelModel first; for a plain module call train::save_checkpoint(folder, "
                "*module, ...) or train::load_checkpoint(folder, *module)");
  if constexpr (kIsModel<Model>) return state_of(model);
  return {};
}
template <class Optimizer>
OptimizerState state_to_keep(Optimizer& optimizer, const ModelState& model) {
  static_assert(
      kIsSaved<Optimizer>,
      "checkpoint: expected an optimizer second, no pointer: cohort::optim::Adam, "
      "torch::optim's SGD, Adam, AdamW, RMSprop or Adagrad, or ZeroRedundancyOptimizer of "
      "one of these; save the state() of others with train::ShardedCheckpointWriter");
  if constexpr (kIsSaved<Optimizer>) return state_of(optimizer, model);
  return {};
}

/// What save, async_save and load take. Not defined.
template <class Options, class Model>
void expects(const Model& model, const std::string& folder, const Options& options = {},
             CallSite site = {});
template <class Options, class Model, IsOptimizer Optimizer>
void expects(const Model& model, Optimizer& optimizer, const std::string& folder,
             const Options& options = {}, CallSite site = {});
template <class Options, class... Arguments>
concept Unexpected = !requires(Arguments & ... arguments) {
  expects<Options>(arguments...);
};
template <class Result, class First, class... Others>
Result refuse(const First& first, const Others&...) {
  state_to_keep(first);
  static_assert(!kIsModel<First>,
                "checkpoint: expected (model, folder) or (model, optimizer, folder), then options");
  throw;
}

void save_state(const ModelState& model, const OptimizerState& optimizer, const std::string& folder,
                const SaveOptions& options, CallSite site);
SaveHandle async_save_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& folder, const SaveOptions& options);
IncompatibleKeys load_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& path, const LoadOptions& options, CallSite site);

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
/// What ranks need not hold alike (`ignored`, buffers) is saved as the first one has it. A shape
/// that differs is an error, for that rank could not load it.
///
/// Collective over the model's ranks; blocks.
/// Errors: c10::ValueError for another optimizer, or one that updates other tensors than the
///         model's, for a negative step, and where DDP's mixed precision has not given the parameters
///         back: on the rank where it is so. Else as ShardedCheckpointWriter::commit.
template <class Model, IsOptimizer Optimizer>
void save(const Model& model, Optimizer& optimizer, const std::string& folder,
          const SaveOptions& options = {}, CallSite site = CallSite::here()) {
  const ModelState state = state_to_keep(model);
  save_state(state, state_to_keep(optimizer, state), folder, options, site);
}
/// The same of the weights alone.
template <class Model>
void save(const Model& model, const std::string& folder, const SaveOptions& options = {},
          CallSite site = CallSite::here()) {
  save_state(state_to_keep(model), {}, folder, options, site);
}
template <class... Arguments>
requires Unexpected<SaveOptions, Arguments...>
void save(const Arguments&... arguments) {
  refuse<void>(arguments...);
}

/// The same in the background: wait() on the handle makes the checkpoint.
/// Local; blocks for the copying.
/// Memory: a copy of what this rank writes.
template <class Model, IsOptimizer Optimizer>
SaveHandle async_save(const Model& model, Optimizer& optimizer, const std::string& folder,
                      const SaveOptions& options = {}) {
  const ModelState state = state_to_keep(model);
  return async_save_state(state, state_to_keep(optimizer, state), folder, options);
}
template <class Model>
SaveHandle async_save(const Model& model, const std::string& folder,
                      const SaveOptions& options = {}) {
  return async_save_state(state_to_keep(model), {}, folder, options);
}
template <class... Arguments>
requires Unexpected<SaveOptions, Arguments...> SaveHandle
async_save(const Arguments&... arguments) {
  return refuse<SaveHandle>(arguments...);
}

/// Loads what save() wrote, or train::save_checkpoint of the same parts. Optimizer state that the
/// checkpoint does not have, because its parameter had no gradient yet, is removed.
///
/// Collective over the model's ranks; blocks.
/// Errors: the same on every rank, as train::load_shards; c10::ValueError as save(), and while
///         unsharded() of a sharded model lives. Nothing has changed then.
template <class Model, IsOptimizer Optimizer>
IncompatibleKeys load(const Model& model, Optimizer& optimizer, const std::string& path,
                      const LoadOptions& options = {}, CallSite site = CallSite::here()) {
  const ModelState state = state_to_keep(model);
  return load_state(state, state_to_keep(optimizer, state), path, options, site);
}
/// The same of the weights alone: also what other programs wrote (train::load_checkpoint).
template <class Model>
IncompatibleKeys load(const Model& model, const std::string& path, const LoadOptions& options = {},
                      CallSite site = CallSite::here()) {
  return load_state(state_to_keep(model), {}, path, options, site);
}
template <class... Arguments>
requires Unexpected<LoadOptions, Arguments...> IncompatibleKeys
load(const Arguments&... arguments) {
  return refuse<IncompatibleKeys>(arguments...);
}

}  // namespace cohort::checkpoint
