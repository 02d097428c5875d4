// SPDX-License-Identifier: Apache-2.0
// Data parallelism: every rank holds the whole model and computes on its own share of the batch.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/profiler.h"
#include "cohort/parallel/gradient_engine.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/model_wrapper.h"
#include "cohort/parallel/tensor_parallel_layout.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Wraps a module holder so that after backward every rank has the mean of all ranks' gradients.
///
///   parallel::DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = true});
///   torch::optim::AdamW optimizer(ddp.parameters(), 3e-4);
///   loss_of(ddp(batch)).backward();  optimizer.step();  optimizer.zero_grad();
///
/// The module keeps its type, its parameter names and its place: `ddp->` and `*ddp` reach it, and
/// what is saved carries no wrapper's prefix. Gradients travel bucket by bucket, while backward
/// computes the others. A movable handle: see ModelWrapper for parameters(), no_sync() and more.
///
/// Collective: constructor, every forward that a backward follows, and that backward. With buffers
///             (and broadcast_buffers) also the first forward of all, and the one after such a
///             backward, even without gradient mode: rank 0's buffers are copied to all ranks, so
///             that validation is of one model. Further forwards without gradient
///             mode send nothing. A rank that validates alone calls the module's own forward.
/// Numerics: gradients travel in their own dtype; the reducer divides by the world size while it
///           copies into the bucket, then sums. For the gradient of a loss normalised by a global
///           count, scale the local loss sum by world_size / global_count. The order of summation
///           is fixed by the bucket layout, which is fixed by the options and the model
///           (rebuild_buckets off).
/// Threads:  one.
/// Errors:   c10::ValueError if the ranks' models differ, if options contradict each other, or at
///           the end of a backward that left out parameters, with their names: one backward gives
///           all gradients. A rank alone in leaving out a parameter throws this while the others
///           wait for it: they get PeerError when it ends, or at the timeout.
///           c10::ValueError from a backward whose forward went past the wrapper, and from a second
///           one of the same forward: their gradients would stay each rank's own.
///           c10::NotImplementedError for create_graph: gradients of gradients are not averaged.
///           PeerError from the constructor, operator() and loss.backward() when a rank is lost.
/// Source:   Li et al. 2020, arXiv:2006.15704, section 3.2.
template <ModuleHolder Holder>
class DistributedDataParallel : public ModelHandle<Holder> {
 public:
  /// `module`: a TORCH_MODULE holder or a shared_ptr. Checks that the ranks' models agree, then
  /// copies rank 0's state to all.
  DistributedDataParallel(Holder module, const comm::ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {},
                          CallSite site = CallSite::here())
      : DistributedDataParallel(CallSiteScope(site), model_ranks(group, options.tensor_parallel),
                                module, group, options) {}
  /// The same among the ranks along the data axes of a mesh, "dp", or "dp_replicate" and "dp_shard".
  /// Along an axis "tp", of this mesh or of that which it is a part of, ranks hold parts of the
  /// model: options.tensor_parallel says which.
  DistributedDataParallel(Holder module, const DeviceMesh& mesh,
                          const DistributedDataParallelOptions& options = {},
                          CallSite site = CallSite::here())
      : DistributedDataParallel(
            CallSiteScope(site),
            model_ranks(*shared_module(module), mesh, options.tensor_parallel, site), module,
            data_axes(mesh).group(site), options) {}

  /// Runs the module's forward. It may return any value that tensor_tree.h can look into.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    const ProfileScope scope("DistributedDataParallel.forward");
    this->check_first_inputs(arguments...);
    engine().before_forward();
    auto output = forward(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor*> tensors;
    for_each_tensor(output, [&](at::Tensor& tensor) {
      tensor = engine().cast_output(tensor);
      tensors.push_back(&tensor);
    });
    engine().after_forward(tensors);
    return output;
  }

  /// Lets `hook` reduce the gradients (comm_hook.h). `name` appears in logging_data. Local: call it
  /// on every rank, with the same hook.
  /// Errors: c10::ValueError the second time, after a training forward outside no_sync(), for an
  /// empty name, or beside mixed_precision.reduce_dtype.
  void register_comm_hook(CommHook hook, const std::string& name = "custom") {
    engine().register_comm_hook(std::move(hook), name);
  }

  GradientEngine& engine() const { return static_cast<GradientEngine&>(ModelWrapper::engine()); }
  int64_t num_buckets() const { return engine().num_buckets(); }
  /// The present layout: given back as an option, it makes another run sum in the same order.
  BucketLayout bucket_layout() const { return engine().bucket_layout(); }
  DdpLoggingData logging_data() const { return engine().logging_data(); }

 private:
  DistributedDataParallel(const CallSiteScope&, ModelRanks ranks, Holder& module,
                          const comm::ProcessGroup& group,
                          const DistributedDataParallelOptions& options)
      : ModelHandle<Holder>(module,
                            std::make_shared<GradientEngine>(shared_module(module), group, options),
                            std::move(ranks)) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) try {
    const auto cast = [&](const at::Tensor& tensor) { return engine().cast_input(tensor); };
    return this->module()->forward(with_tensors(std::forward<Arguments>(arguments), cast)...);
  } catch (...) {
    engine().abandon_forward();
    throw;
  }
};

}  // namespace cohort::parallel
