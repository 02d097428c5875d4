// Data parallelism: every rank holds the whole model and computes on its own share of the batch.
#pragma once
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/parallel/gradient_engine.h"

namespace cohort::parallel {

/// Wraps a module holder so that after backward every rank has the mean of all ranks' gradients.
///
/// The module keeps its type, its parameter names and its place: `ddp->` and `*ddp` reach it, and
/// what is saved carries no wrapper's prefix. Gradients travel bucket by bucket, in the order in
/// which backward makes them, while backward goes on; the first step finds that order out.
///
/// Collective: constructor, every forward that a backward follows, and that backward.
/// Numerics: gradients travel in their own dtype; the engine divides by the world size while it
///           copies into the bucket, then sums. For the gradient of a loss normalised by a global
///           count, scale the local loss sum by world_size / global_count.
/// Threads:  one.
/// Errors:   c10::ValueError if the ranks' models differ; PeerError from the constructor,
/// operator() and
///           backward when a rank is lost.
/// Source:   Li et al. 2020, arXiv:2006.15704, section 3.2.
template <class Holder>
class DistributedDataParallel {
 public:
  /// `group` must outlive this. Checks that the ranks' models agree, then copies rank 0's state to
  /// all.
  DistributedDataParallel(Holder module, comm::ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), engine_(*module_, group, options) {}

  /// Runs the module's forward.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    engine_.before_forward();
    auto output = module_->forward(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor> tensors;
    collect(output, tensors);
    engine_.after_forward(tensors);
    return output;
  }

  /// As loss.backward(gradient), with a lost peer reported as PeerError.
  void backward(const at::Tensor& loss, const at::Tensor& gradient = {}) {
    engine_.backward(loss, gradient);
  }

  /// Accumulate locally while the returned guard lives: forward and backward inside it send
  /// nothing, and the first backward after it sends the accumulated sum. The forward must be
  /// inside, too.
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

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }
  int64_t num_buckets() const { return engine_.num_buckets(); }

 private:
  template <class T>
  static void collect(const T& value, std::vector<at::Tensor>& tensors) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      tensors.push_back(value);
    } else if constexpr (requires { std::tuple_size<T>::value; }) {
      std::apply([&](const auto&... each) { (collect(each, tensors), ...); }, value);
    } else if constexpr (requires { value.begin(); }) {
      for (const auto& each : value) collect(each, tensors);
    }
  }

  Holder module_;
  GradientEngine engine_;
};

}  // namespace cohort::parallel
