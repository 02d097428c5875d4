// SPDX-License-Identifier: Apache-2.0
// The parameters that travel outside the buckets, in one piece.
#pragma once
#include <vector>

#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/model_state.h"

namespace cohort::parallel {

/// Averages the gradients of its parameters in one all-reduce per backward.
///
/// Owner:      GradientEngine, which reports each gradient once.
/// Threads:    the one that runs backward.
/// Collective: the report after which every gradient is there; all ranks must come to it at the
///             same place between the buckets, as ranks with the same graph do.
class DelayedParameters {
 public:
  /// `parameters`: of one type and device. `num_gradients`: theirs and, if it is none of them, the
  /// trigger's.
  DelayedParameters(std::vector<NamedTensor> parameters, size_t num_gradients,
                    const comm::ProcessGroup& group);

  const std::vector<NamedTensor>& parameters() const { return parameters_; }

  void prepare() { awaited_ = num_gradients_; }  ///< Before each backward that is to be averaged.
  /// One more of the gradients is complete. Starts the all-reduce once all are, and has the
  /// averages copied back when the backward ends.
  void arrived();
  bool expects_gradients() const { return awaited_ > 0; }  ///< Prepared, but not all have arrived.
  void abandon();  ///< Waits for what an unfinished backward has sent, then forgets it.

 private:
  void start();
  void finish();

  std::vector<NamedTensor> parameters_;
  size_t num_gradients_;
  comm::ProcessGroup group_;
  size_t awaited_ = 0;  // gradients still to come
  TensorFuture average_;
};

}  // namespace cohort::parallel
