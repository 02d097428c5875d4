// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/model_checkpoint.h"

#include <algorithm>
#include <map>
#include <torch/types.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/parallel/tensor_parallel_layout.h"
#include "cohort/train/optimizer_state.h"

namespace cohort::checkpoint {
namespace {

constexpr const char* kWeights = "weights";
constexpr const char* kOptimizer = "optimizer";

optim::Adam* adam_of(const OptimizerState& optimizer) {
  const auto* found = std::get_if<optim::Adam*>(&optimizer.optimizer);
  return found == nullptr ? nullptr : *found;
}

torch::optim::Optimizer* torch_of(const OptimizerState& optimizer) {
  const auto* found = std::get_if<torch::optim::Optimizer*>(&optimizer.optimizer);
  return found == nullptr ? nullptr : *found;
}

int64_t step_of(const OptimizerState& optimizer, const SaveOptions& options) {
  TORCH_CHECK_VALUE(options.step.value_or(0) >= 0, "checkpoint: step: expected 0 or more, got ",
                    options.step.value_or(0));
  const optim::Adam* adam = adam_of(optimizer);
  if (adam == nullptr) return options.step.value_or(0);
  TORCH_CHECK_VALUE(!options.step || *options.step == adam->num_steps(),
                    "checkpoint: expected Adam's number of steps, ", adam->num_steps(),
                    ", as step, got ", *options.step);
  return adam->num_steps();
}

// Those of the whole model.
std::vector<train::TensorShard> full_shards(const ModelState& model,
                                            const std::vector<train::TensorShard>& shards,
                                            parallel::Replicated replicated) {
  const auto& layout = model.ranks.tensor_parallel;
  return layout ? layout->full_model_shards(shards, replicated) : shards;
}

train::ShardedParts parts_to_save(const ModelState& model, const OptimizerState& optimizer) {
  train::ShardedParts parts{{kWeights, {}}};
  if (model.saves) parts[kWeights] = train::shards_of(model.to_save);
  std::vector<train::TensorShard> state;
  if (optim::Adam* adam = adam_of(optimizer))
    state = train::shards_like(optimizer.parameters, adam->state());
  if (torch::optim::Optimizer* other = torch_of(optimizer))
    state = train::optimizer_slices(*other, optimizer.parameters);
  if (optimizer.optimizer.index() != 0) {
    parts[kOptimizer];
    if (optimizer.saves) parts[kOptimizer] = train::shards_of(state);
  }
  for (auto& [part, shards] : parts)
    shards = full_shards(model, shards, parallel::Replicated::kOnce);
  return parts;
}

// Names, types and shapes of what this rank loads. Each shard stands for itself with one element at
// most, of no memory: along "tp" a shard of the model may be many of the whole model.
train::ShardedParts parts_to_load(const ModelState& model) {
  std::vector<train::TensorShard> shards;
  for (const train::TensorShard& shard : model.to_load) {
    const int64_t count = std::min<int64_t>(shard.end - shard.begin, 1);
    const auto type = at::device(at::kMeta).dtype(shard.tensor.scalar_type());
    shards.push_back(
        {shard.name, shard.shape, shard.begin, shard.begin + count, at::empty({count}, type)});
  }
  return {{kWeights, full_shards(model, shards, parallel::Replicated::kEverywhere)}};
}

}  // namespace

void SaveHandle::wait(CallSite site) {
  const auto writer = std::exchange(writer_, nullptr);
  if (writer) writer->commit(site);
}

void SaveHandle::drop() {
  if (!writer_) return;
  TORCH_WARN("checkpoint: a SaveHandle goes without wait(): its save is lost");
  writer_ = nullptr;
}

void save_state(const ModelState& model, const OptimizerState& optimizer, const std::string& folder,
                const SaveOptions& options, CallSite site) {
  train::ShardedCheckpointWriter writer(model.ranks.all);
  writer.begin_without_copy(folder, parts_to_save(model, optimizer), step_of(optimizer, options),
                            options.metadata);
  writer.require_loadable([&] { return parts_to_load(model); });
  writer.commit(site);
}

SaveHandle async_save_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& folder, const SaveOptions& options) {
  auto writer = std::make_unique<train::ShardedCheckpointWriter>(model.ranks.all);
  writer->begin(folder, parts_to_save(model, optimizer), step_of(optimizer, options),
                options.metadata);
  writer->require_loadable([&] { return parts_to_load(model); });
  return SaveHandle(std::move(writer));
}

IncompatibleKeys load_state(const ModelState& model, const OptimizerState& optimizer,
                            const std::string& path, const LoadOptions& options, CallSite site) {
  TORCH_CHECK_VALUE(
      !model.shows_copies,
      "checkpoint: load within unsharded(): expected it after the guard has ended; until then the "
      "module's parameters keep their values");
  optim::Adam* const adam = adam_of(optimizer);
  torch::optim::Optimizer* const other = torch_of(optimizer);
  std::optional<train::OptimizerLoad> load;
  std::optional<int64_t> num_steps;
  const auto make_parts = [&](StoredCheckpoint& checkpoint) {
    train::ShardedParts parts{{kWeights, train::shards_of(model.to_load)}};
    load.reset();
    const auto there = checkpoint.parts();
    const bool has_state = std::find(there.begin(), there.end(), kOptimizer) != there.end();
    if (options.strict && has_state && optimizer.optimizer.index() != 0) {
      std::vector<std::string> state;
      for (const auto& [name, tensor] : checkpoint.part(kOptimizer)) state.push_back(name);
      train::check_optimizer_class(
          checkpoint.path(), state,
          other == nullptr ? "cohort::optim::Adam" : train::class_of(*other));
    }
    if (adam != nullptr) {
      parts[kOptimizer] = train::shards_like(optimizer.parameters, adam->state());
      num_steps = checkpoint.manifest().update;
      if (has_state && !num_steps)
        throw ConfigError(checkpoint.path() + ": expected the update that it was saved after");
      if (!has_state) num_steps.reset();
    }
    if (other != nullptr) {
      std::map<std::string, std::string> names;
      if (has_state) names = train::renamed_tensors(checkpoint, kOptimizer, options.rename);
      load.emplace(*other, optimizer.parameters,
                   [&](const std::string& name) { return names.contains(name); });
      parts[kOptimizer] = load->local_shards();
      if (!has_state) load.reset();
    }
    for (auto& [part, shards] : parts)
      shards = full_shards(model, shards, parallel::Replicated::kEverywhere);
    return parts;
  };
  IncompatibleKeys keys = train::load_shards(path, make_parts, model.ranks.all, options, site);
  if (load) load->install();
  if (num_steps) adam->set_num_steps(*num_steps);
  return keys;
}

}  // namespace cohort::checkpoint
