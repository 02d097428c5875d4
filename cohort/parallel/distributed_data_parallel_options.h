// SPDX-License-Identifier: Apache-2.0
// Options of DistributedDataParallel, with PyTorch's names and meanings; docs/ddp.md has the table.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cohort/parallel/mixed_precision_options.h"
#include "cohort/parallel/tensor_parallel_plan.h"

namespace cohort::parallel {

/// Names of parameters, bucket by bucket, in the order in which buckets are sent.
using BucketLayout = std::vector<std::vector<std::string>>;

struct DistributedDataParallelOptions {
  double bucket_cap_mb =
      25;  ///< Gradient bucket, MiB, > 0: closed once it has as much; a parameter that has as much
           ///< alone is alone in its bucket.
  double first_bucket_mb =
      1;  ///< The first bucket to be sent, MiB, > 0, at most bucket_cap_mb counts.
  /// Caps of the first, second ... bucket in MiB; the last one holds for all further ones. Replaces
  /// both caps above.
  std::vector<double> bucket_cap_mb_list;
  bool broadcast_buffers = true;        ///< Copies rank 0's buffers to all ranks.
  bool find_unused_parameters = false;  ///< Some parameters take no part in some steps.
  /// Gradients live in the buckets: less memory and no copy. Saves most with an optimizer whose
  /// zero_grad resets them, as is the default of libtorch's. Over shm and hierarchical, and
  /// with a communication hook, operations of cohort::nmt write them there at once: a hook on a
  /// parameter must copy a gradient that it keeps.
  bool gradient_as_bucket_view = false;
  bool static_graph = false;  ///< The same parameters take part, as often, in every step.
  bool init_sync = true;  ///< Verify that the models agree and copy rank 0's state; else that is
                          ///< the caller's care.
  /// With find_unused_parameters: buckets that this step does not touch are not sent. Every rank
  /// must leave out the same parameters.
  bool skip_all_reduce_unused_params = false;
  /// Cut the buckets again after the first step, in the order in which its gradients came, as
  /// PyTorch does. Off: they are cut once, in reverse order of forward_order, and the order of
  /// summation never changes (bucket_layout).
  bool rebuild_buckets = false;
  /// Names of all parameters in buckets, in the order in which forward first uses them: gradients
  /// are expected in reverse, and sent so. Empty: the order of registration. No bucket is sent
  /// before the one ahead of it, so a gradient that comes later than expected keeps back those
  /// behind it.
  std::vector<std::string> forward_order;
  BucketLayout bucket_layout;  ///< The layout to use, from DistributedDataParallel::bucket_layout;
                               ///< empty: cut one.
  /// Parameters and buffers that are left alone: not verified, copied, cast or averaged.
  std::vector<std::string> ignored;
  /// Parameters outside the buckets, averaged in one piece once the gradient of
  /// `param_to_hook_all_reduce` and theirs are there. Without find_unused_parameters and
  /// static_graph: each gradient comes once in every backward.
  std::vector<std::string> delay_all_reduce_named_params;
  std::string param_to_hook_all_reduce;  ///< Set together with delay_all_reduce_named_params.
  MixedPrecision mixed_precision;
  int logging_sample_rate =
      100;  ///< Times are taken in the first 10 steps, then in every this many, > 0.
  /// What the ranks along the mesh's axis "tp" hold in parts; needed if there is such an axis.
  std::optional<TensorParallelPlan> tensor_parallel;
};

}  // namespace cohort::parallel
