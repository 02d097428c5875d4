// SPDX-License-Identifier: Apache-2.0
// c10d's Reducer with what PyTorch's Python side reaches by other ways, or lacks. For the gradient
// engine alone.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "cohort/optim/gradient_memory.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/distributed_data_parallel_options.h"
#include "cohort/parallel/model_state.h"

namespace cohort::parallel {

/// Bucket by bucket, indices into the list of parameters.
using BucketIndices = std::vector<std::vector<size_t>>;

/// Owner:   GradientEngine.
/// Threads: as c10d::Reducer: the one that runs backward.
class Reducer : public c10d::Reducer {
 public:
  /// c10d's arguments `args` without its process group, which is `group`'s. The buckets, these and
  /// those of every rebuild, lie in memory that its backend reads in place, if it has such
  /// (comm/shared_tensor.h). None is there twice but while it moves. With gradient_as_bucket_view
  /// gradients may be written there at once (optim/gradient_memory.h), once a hook carries buckets.
  /// Errors: c10::OutOfMemoryError.
  template <class... Args>
  Reducer(const comm::ProcessGroup& group, std::vector<at::Tensor> parameters,
          BucketIndices buckets, Args&&... args)
      : c10d::Reducer(std::move(parameters), std::move(buckets),
                      c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group.c10d_group()),
                      std::forward<Args>(args)...),
        group_(group) {
    move_buckets();
  }
  /// c10d's, and moves the new buckets.
  bool rebuild_buckets();
  void keep_layout() { has_rebuilt_bucket_ = true; }  ///< The present buckets are never cut again.
  BucketIndices layout() const;
  bool has_rebuilt() const { return has_rebuilt_bucket_; }
  /// Lets `hook` carry the buckets, in place of an earlier one. `name`: of its calls in traces.
  void carry_by(CommHook hook, const std::string& name = "");
  /// A forward has prepared a backward which has not averaged its gradients yet.
  bool expects_gradients() const { return expect_autograd_hooks_; }
  /// That backward has made some bucket's gradient.
  bool begun() const { return require_finalize_; }
  /// The search of the graph has left parameter `index` out of the prepared backward.
  bool is_unused(size_t index) const;
  /// No bucket behind `bucket` is sent in this backward.
  bool is_last_sent(size_t bucket) const;
  /// By the first step of a static graph, parameter `index` still gets a gradient in this backward.
  bool awaits(size_t index) const;
  /// Before a static graph's first synchronized step: the gradients counted so far were made
  /// without synchronization, and later steps would wait for as many again.
  void forget_unsynchronized();
  /// What the next backward divides gradients by; after it the world size holds again.
  void set_divisor(int divisor) { div_factor_ = divisor; }
  /// Waits for the buckets that this backward has sent, and keeps when it ended to compute.
  /// Errors: what a bucket's future holds.
  void wait_for_averages();
  /// After the averages were taken: makes the time that wait_for_averages kept the one that counts,
  /// in place of the time at which the averages were there.
  void restore_end_of_compute();
  /// Waits for the buckets that an unfinished backward has sent, then forgets that backward.
  void abandon_backward();
  /// Takes part in the other ranks' reductions of one backward with zeros; not in a static graph's
  /// first.
  /// Collective; blocks.
  void shadow_collectives();

 private:
  class HookAdapter;
  void move_buckets();
  void offer_buckets();
  const comm::ProcessGroup group_;
  HookAdapter* hook_ = nullptr;  // The base's.
  optim::GradientMemory gradient_memory_;
  int64_t end_of_compute_ = -1;
};

/// Returns the buckets that `options` ask for: its layout, or cuts by size.
/// Errors: c10::ValueError naming the parameters that options.bucket_layout or forward_order lacks,
/// repeats or does not know.
BucketIndices initial_buckets(const std::vector<NamedTensor>& parameters,
                              const DistributedDataParallelOptions& options);

/// Makes the Reducer for `parameters`, as PyTorch's Python side does. Local.
std::shared_ptr<Reducer> make_reducer(const std::vector<NamedTensor>& parameters,
                                      const comm::ProcessGroup& group,
                                      const DistributedDataParallelOptions& options);

}  // namespace cohort::parallel
