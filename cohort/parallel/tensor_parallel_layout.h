// SPDX-License-Identifier: Apache-2.0
// The parts of a model that the ranks of a tensor-parallel group hold, as parts of the whole model.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/base/tensor_part.h"
#include "cohort/comm/process_group.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/model_wrapper.h"
#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/parallel/tensor_parallel_plan.h"

namespace cohort::parallel {

/// How replicated tensors appear among the shards of the whole model.
enum class Replicated {
  kEverywhere,  ///< On every rank: to load them.
  kOnce,        ///< Each rank has its share: to save them.
};

/// Knows which tensors are cut, and the whole ones' shapes.
/// Threads: any, it does not change.
class TensorParallelLayout {
 public:
  /// `model` is this rank's part, with the names of the whole one. Collective over `group`; blocks.
  /// Errors: c10::ValueError that names the tensor, for one that the model does not have, a
  ///         dimension that it does not have, and, the same on every rank, for replicated tensors
  ///         of different shapes and sizes that are not those of the cuts.
  TensorParallelLayout(const torch::nn::Module& model, const TensorParallelPlan& plan,
                       const comm::ProcessGroup& group, CallSite site = CallSite::here());

  const comm::ProcessGroup& group() const { return group_; }
  bool is_cut(const std::string& name) const { return parts_.contains(name); }
  /// This rank's part of a parameter or buffer; null: it has the whole.
  const TensorPart* part_of(const std::string& name) const {
    const auto found = parts_.find(name);
    return found == parts_.end() ? nullptr : &found->second;
  }

  /// A rank's shards as shards of the whole model, under its shapes: a checkpoint of all ranks is
  /// then the plain model's. Where a cut is not of the first dimension, each row makes a shard.
  /// `shards` are of parameters and buffers, or of tensors like them, "<parameter>.exp_avg"; they
  /// share memory with the result. Local.
  /// Errors: c10::ValueError for a shard of another shape than the part's, or not contiguous.
  std::vector<LocalShard> full_model_shards(const std::vector<LocalShard>& shards,
                                            Replicated replicated) const;

 private:
  const TensorPart* find_part(const LocalShard& shard) const;

  comm::ProcessGroup group_;
  std::map<std::string, TensorPart> parts_;  // of what is cut
};

/// The ranks of a model that is wrapped on a mesh. Collective over the mesh's world; blocks.
/// Errors: c10::ValueError if the mesh, or that which it is a part of, has an axis "tp" of more
///         than one rank and there is no plan, or there is a plan and no such axis. The same on
///         every rank: if a tensor that is not in the plan differs between ranks along "tp", or if
///         one in the plan is the same on all of them, unless all its elements are equal. Also as
///         TensorParallelLayout.
ModelRanks model_ranks(const torch::nn::Module& model, const DeviceMesh& mesh,
                       const std::optional<TensorParallelPlan>& plan,
                       CallSite site = CallSite::here());
/// The same in a group, where no plan can be followed. Local.
ModelRanks model_ranks(const comm::ProcessGroup& group,
                       const std::optional<TensorParallelPlan>& plan);

}  // namespace cohort::parallel
