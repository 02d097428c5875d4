// Data parallelism: every rank holds the whole model and computes on its own share of the batch.
#pragma once
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/parallel/gradient_engine.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// Wraps a module holder so that after backward every rank has the mean of all ranks' gradients.
///
/// The module keeps its type, its parameter names and its place: `ddp->` and `*ddp` reach it, and
/// what is saved carries no wrapper's prefix. Gradients travel bucket by bucket, while backward
/// goes on.
///
/// Collective: constructor, every forward that a backward follows, and that backward. With buffers
///             (and broadcast_buffers) also the forward after it, of whatever kind: it brings rank
///             0's to all ranks, so validation is of one model. Further forwards without gradient
///             mode send nothing. A rank that validates alone calls the module's own forward.
/// Numerics: gradients travel in their own dtype; the reducer divides by the world size while it
///           copies into the bucket, then sums. For the gradient of a loss normalised by a global
///           count, scale the local loss sum by world_size / global_count. The order of summation
///           is fixed by the bucket layout, which is fixed by the options and the model
///           (rebuild_buckets off).
/// Threads:  one.
/// Errors:   c10::ValueError if the ranks' models differ, if options contradict each other, or if a
/// backward left out
///           parameters: `backward` names them at once, after a plain loss.backward() the next
///           forward does. A rank alone in leaving out a parameter throws this while the others
///           wait for it: they get PeerError when it ends, or at the timeout.
///           c10::ValueError from a backward whose forward went past the wrapper, and from a second
///           one of the same forward: their gradients would stay each rank's own.
///           c10::NotImplementedError for create_graph: gradients of gradients are not averaged.
///           PeerError from the constructor, operator() and backward when a rank is lost.
/// Source:   Li et al. 2020, arXiv:2006.15704, section 3.2.
template <class Holder>
class DistributedDataParallel {
 public:
  /// Checks that the ranks' models agree, then copies rank 0's state to
  /// all.
  DistributedDataParallel(Holder module, const comm::ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), engine_(*module_, group, options) {}
  /// The same among the ranks along all axes of a mesh.
  DistributedDataParallel(Holder module, const DeviceMesh& mesh,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(module), mesh.group(), options) {}

  /// Runs the module's forward. It may return any value that tensor_tree.h can look into.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    engine_.before_forward();
    auto output = forward(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor*> tensors;
    for_each_tensor(output, [&](at::Tensor& tensor) {
      tensor = engine_.cast_output(tensor);
      tensors.push_back(&tensor);
    });
    engine_.after_forward(tensors);
    return output;
  }

  /// As loss.backward(gradient), with a lost peer reported as PeerError.
  void backward(const at::Tensor& loss, const at::Tensor& gradient = {}) {
    engine_.backward(loss, gradient);
  }

  /// Accumulate locally while the returned guard lives: backward inside it sends nothing, and the
  /// first one after it sends the accumulated sum. The forward must be inside, too; after a
  /// synchronized one it still brings rank 0's buffers.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(GradientEngine& engine)
        : engine_(engine), before_(engine.set_synchronized(false)) {}
    ~NoSync() { engine_.set_synchronized(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    GradientEngine& engine_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(engine_); }

  /// Lets `hook` carry the gradients (comm_hook.h). `name` appears in logging_data.
  /// Errors: c10::ValueError the second time, after a backward, or beside
  /// mixed_precision.reduce_dtype.
  void register_comm_hook(CommHook hook, const std::string& name = "custom") {
    engine_.register_comm_hook(std::move(hook), name);
  }

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }
  GradientEngine& engine() { return engine_; }
  int64_t num_buckets() const { return engine_.num_buckets(); }
  /// The present layout: given back as an option, it makes another run sum in the same order.
  BucketLayout bucket_layout() const { return engine_.bucket_layout(); }
  DdpLoggingData logging_data() const { return engine_.logging_data(); }

 private:
  template <class... Arguments>
  auto forward(Arguments&&... arguments) try {
    const auto cast = [&](const at::Tensor& tensor) { return engine_.cast_input(tensor); };
    return module_->forward(with_tensors(std::forward<Arguments>(arguments), cast)...);
  } catch (...) {
    engine_.abandon_forward();
    throw;
  }

  Holder module_;
  GradientEngine engine_;
};

}  // namespace cohort::parallel
