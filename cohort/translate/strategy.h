// How the ranks of a run share one translator: what each of them holds of parameters, gradients and
// optimizer state.
#pragma once
#include <ATen/core/Tensor.h>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"

namespace cohort::translate {

/// The ladder; parallel/sharding says what each step saves.
enum class Strategy { kDdp, kZero1, kZero2, kZero3 };

/// Parses "ddp", "zero1", "zero2", "zero3" or "fsdp", which is zero3 by its other name.
/// Errors: ConfigError for another name.
Strategy parse_strategy(const std::string& name);
std::string to_string(Strategy strategy);

/// A translator on all ranks of a group. Threads: one.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Sums of the losses over the batch's target tokens: {smoothed, plain}.
  /// Collective where parameters are sharded; blocks.
  virtual std::tuple<at::Tensor, at::Tensor> forward(const nmt::Batch& batch) = 0;
  /// As loss.backward(gradient): leaves the mean over ranks as gradients of `parameters`.
  /// Collective unless set_synchronized(false); blocks.
  virtual void backward(const at::Tensor& loss, const at::Tensor& gradient) = 0;
  /// While false, gradients add up on this rank. Returns what it was.
  virtual bool set_synchronized(bool on) = 0;

  /// Name and tensor of what this rank's optimizer updates: parameters, or slices of them.
  virtual std::vector<std::pair<std::string, at::Tensor>> parameters() = 0;
  /// Of the whole gradient, the same on every rank. Collective where gradients are sharded.
  virtual double gradient_norm() = 0;
};

/// Verifies that the ranks' models agree, then copies rank 0's to all. `group` must outlive the
/// result. Collective; blocks.
std::unique_ptr<ParallelModel> make_parallel_model(nmt::Transformer model,
                                                   comm::ProcessGroup& group, Strategy strategy);

}  // namespace cohort::translate
