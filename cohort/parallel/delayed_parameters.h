// The parameters that travel outside the buckets, in one piece.
#pragma once
#include <string>
#include <vector>

#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/model_state.h"

namespace cohort::parallel {

/// Averages the gradients of its parameters in one all-reduce per backward.
///
/// Owner: GradientEngine, which reports each gradient. Threads: the one that runs backward.
/// Collective: the report after which every gradient is there; all ranks must come to it at the
/// same place between the buckets, as ranks with the same graph do.
class DelayedParameters {
 public:
  /// `parameters`: of one type and device.
  DelayedParameters(std::vector<NamedTensor> parameters, std::string trigger,
                    comm::ProcessGroup& group);

  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const std::string& trigger() const { return trigger_; }

  void prepare();  ///< Before each backward that is to be averaged.
  /// The gradient of `name` is complete. Starts the all-reduce once all and the trigger's are, and
  /// has the averages copied back when the backward ends.
  void arrived(const std::string& name);

 private:
  void start();
  void finish();

  std::vector<NamedTensor> parameters_;
  std::string trigger_;
  comm::ProcessGroup& group_;
  size_t awaited_ = 0;  // gradients still to come, the trigger's included
  TensorFuture average_;
};

}  // namespace cohort::parallel
