// SPDX-License-Identifier: Apache-2.0
// What DistributedDataParallel does around forward and backward, over c10d's Reducer. Not a
// template.
#pragma once
#include <ATen/core/Tensor.h>
#include <memory>
#include <string>
#include <torch/nn/module.h>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/distributed_data_parallel_options.h"
#include "cohort/parallel/model_state.h"
#include "cohort/parallel/model_wrapper.h"

namespace cohort::parallel {

/// What ranks do that run out of batches before others; see join.h.
struct JoinOptions {
  /// Gradients are divided by the number of ranks (true), or by that of the ranks which still have
  /// batches. A communication hook divides as it pleases; mixed_precision.reduce_dtype follows.
  bool divide_by_initial_world_size = true;
  /// All ranks throw as soon as one has run out.
  bool throw_on_early_termination = false;
};

/// What the engine has measured; nanoseconds, averages over the sampled steps.
struct DdpLoggingData {
  int64_t iteration = 0;  ///< Of the last sample; 0 before the first.
  int64_t num_parameter_tensors = 0;
  int64_t total_parameter_size_bytes = 0;
  std::vector<int64_t> bucket_sizes_bytes;  ///< Of the present layout, in the order of sending.
  bool has_rebuilt_buckets = false;
  int64_t forward_compute_time = 0;
  int64_t backward_compute_time = 0;
  int64_t backward_comm_time = 0;  ///< From the first bucket sent to the last one received.
  int64_t backward_compute_comm_overlap_time = 0;  ///< The part of it that backward hid.
  std::string comm_hook;  ///< The name given to register_comm_hook; empty: all-reduce.
};

/// Averages gradients over ranks while backward runs.
///
/// Owner:      DistributedDataParallel; owns the model.
/// Threads:    one.
/// Collective: constructor, before_forward, the backward, finish_join.
class GradientEngine final : public ModelEngine {
 public:
  GradientEngine(std::shared_ptr<torch::nn::Module> model, const comm::ProcessGroup& group,
                 const DistributedDataParallelOptions& options);
  ~GradientEngine() override;

  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const override;
  std::vector<std::pair<std::string, at::Tensor>> averaged_parameters() const override;
  comm::ProcessGroup shard_group() const override { return {}; }

  /// Everything before the module's forward. Rank 0's buffers are sent where a synchronized forward
  /// was the last one, whatever this one is.
  /// Errors: c10::ValueError if a parameter or buffer changed its type, shape or device, or if the
  /// last backward left out parameters without saying so itself, as one does whose loss does not
  /// come from the outputs; not if it threw: it is forgotten.
  void before_forward();
  /// Everything after it. Replaces tensors of `outputs` by others of equal value where the engine
  /// must see their backward begin.
  void after_forward(const std::vector<at::Tensor*>& outputs);
  /// Call instead of after_forward when the module's forward threw. Local.
  void abandon_forward();
  at::Tensor cast_input(const at::Tensor& input) const;
  at::Tensor cast_output(const at::Tensor& output) const;

  void register_comm_hook(CommHook hook, const std::string& name);
  BucketLayout bucket_layout() const;
  DdpLoggingData logging_data() const;
  comm::ProcessGroup group() const;
  int64_t num_buckets() const;  ///< Of the engine's present layout.

  /// Errors: c10::ValueError between a forward in low precision and its backward: the module's
  ///         tensors are copies then. Local.
  void check_masters() const;

  void begin_join(const JoinOptions& options);  ///< Collective only in what follows.
  void finish_join();                           ///< Shadows collectives until no rank has batches.
  void end_join() noexcept;  ///< Local: forward no longer notifies the join context.

 private:
  void set_synchronized(bool on) override;
  void unshard() override { check_masters(); }  // Parameters are always whole.
  void reshard(bool /*write_back*/) override {}

  struct Impl;
  std::shared_ptr<Impl> impl_;  // graphs refer to it
};

}  // namespace cohort::parallel
