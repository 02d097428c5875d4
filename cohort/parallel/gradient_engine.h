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

namespace cohort::parallel {

/// Options of DistributedDataParallel, with PyTorch's names and meanings.
struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;            ///< Largest gradient bucket, MiB, > 0.
  bool broadcast_buffers = true;        ///< Buffers follow rank 0's before each forward.
  bool find_unused_parameters = false;  ///< Some parameters take no part in some steps.
  /// Gradients live in the buckets: less memory and no copy. Only with an optimizer whose zero_grad
  /// lets them go, as optim::Adam's; libtorch's own calls detach_(), which views forbid.
  bool gradient_as_bucket_view = false;
  bool static_graph = false;  ///< The same parameters take part in every step.
};

/// Throws unless every rank's model has the same parameter and buffer names, shapes and dtypes in
/// the same order.
///
/// Collective; blocks. Errors: c10::ValueError on every rank, naming the first difference and the
/// rank.
void verify_same_model(const torch::nn::Module& model, comm::ProcessGroup& group);

/// Copies rank 0's parameters and buffers to every rank. Collective; blocks.
void broadcast_model(const torch::nn::Module& model, comm::ProcessGroup& group);

/// Averages gradients over ranks while backward runs.
///
/// Owner: DistributedDataParallel; holds references to the model's parameters and to the group,
/// which must both outlive it. Threads: one. Collective: constructor, before_forward, and the
/// backward.
class GradientEngine {
 public:
  GradientEngine(torch::nn::Module& model, comm::ProcessGroup& group,
                 const DistributedDataParallelOptions& options);
  ~GradientEngine();

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  void backward(const at::Tensor& loss, const at::Tensor& gradient);
  bool set_synchronized(bool on);  ///< Returns what it was; false inside no_sync.
  int64_t num_buckets() const;     ///< Of the engine's present layout.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::parallel
