// SPDX-License-Identifier: Apache-2.0
// The backward under DistributedDataParallel: when it begins, what it has brought, how it ends.
#include <functional>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "cohort/base/error.h"
#include "cohort/parallel/gradient_engine_impl.h"

namespace cohort::parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Passes gradients through and says when the backward of a forward's outputs begins. Outputs that
// the loss does not use get undefined gradients, which still reach every parameter behind them.
struct OutputSink : Node {
  explicit OutputSink(std::function<void()> on_backward) : begin(std::move(on_backward)) {}
  variable_list apply(variable_list&& gradients) override {
    begin();
    return std::move(gradients);
  }
  std::function<void()> begin;
};

void pass_through_sink(const std::vector<at::Tensor*>& outputs, std::function<void()> on_backward) {
  std::vector<at::Tensor*> inner;
  torch::autograd::edge_list edges;
  for (at::Tensor* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    inner.push_back(output);
    edges.push_back(torch::autograd::impl::gradient_edge(*output));
  }
  if (inner.empty()) return;
  const auto sink = comm::make_node<OutputSink>(std::move(on_backward));
  sink->set_next_edges(std::move(edges));
  for (at::Tensor* output : inner) {
    at::Tensor same = output->detach();
    torch::autograd::set_history(same, sink);
    *output = same;
  }
}

}  // namespace

void GradientEngine::Impl::watch_gradients() {
  ready.resize(watched.size());
  for (size_t i = 0; i < watched.size(); ++i) {
    const auto accumulator = torch::autograd::impl::grad_accumulator(watched[i].tensor);
    const auto key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const variable_list& outputs, const variable_list&) {
              gradient_arrived(i);
              return outputs;
            }));
    hooks.emplace_back(accumulator, key);
  }
}

// Lives as long as one backward.
struct GradientEngine::Impl::RestoreAfterError {
  explicit RestoreAfterError(std::weak_ptr<Impl> engine) : of(std::move(engine)) {}
  ~RestoreAfterError() {
    const auto engine = of.lock();
    if (engine && !completed) engine->restore_after_error(counted);
  }
  std::weak_ptr<Impl> of;
  bool counted = false;  // among the rank's collectives
  bool completed = false;
};

// What the loss takes from `outputs` is reached by backward before any parameter.
void GradientEngine::Impl::watch_backward(const std::vector<at::Tensor*>& outputs) {
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    output->register_hook([weak = weak_from_this(), of = synchronized](const at::Tensor&) {
      const auto engine = weak.lock();
      TORCH_CHECK(engine,
                  "a backward after the end of its DistributedDataParallel: expected that to live "
                  "until then");
      engine->backward_begins(of);
    });
  }
}

// In every step of a static graph, or outputs that the loss leaves out would bring gradients in the
// first one alone.
void GradientEngine::Impl::watch_static_graph(const std::vector<at::Tensor*>& outputs) {
  pass_through_sink(outputs, [weak = weak_from_this()] {
    const auto engine = weak.lock();
    if (!engine || !engine->options.static_graph || engine->static_graph != StaticGraph::kUnknown)
      return;
    engine->static_graph = StaticGraph::kQueued;
    torch::autograd::Engine::get_default_engine().queue_callback([engine] {
      engine->group.translate_errors(kReduction, [&] { engine->reducer->delay_all_reduce(); });
      engine->static_graph = StaticGraph::kKnown;
    });
  });
}

// Callbacks run in the order in which they were queued: this one before the Reducer's, which takes
// the averages, and the one that it queues after that.
void GradientEngine::Impl::backward_begins(bool of_synchronized) {
  const int64_t number = torch::autograd::get_current_graph_task_id();
  const bool known = std::exchange(graph_task, number) == number;
  averages = of_synchronized || (known && averages);
  if (known) return;
  auto& autograd = torch::autograd::Engine::get_default_engine();
  const auto life = std::make_shared<RestoreAfterError>(weak_from_this());
  autograd.queue_callback([this, &autograd, life] {
    // Gradients of inputs alone are no business of the ranks; the parameters' are still to come.
    life->completed = backward == Backward::kAwaited || last_forward != Forward::kSynchronized;
    if (life->completed) return;
    life->counted = true;
    group.run_collective(kReduction, [this] { reducer->wait_for_averages(); });
    autograd.queue_callback([this, life] {
      backward_ends();
      life->completed = true;
    });
  });
}

void GradientEngine::Impl::backward_ends() {
  reducer->restore_end_of_compute();
  // libtorch's optimizers detach gradients in place.
  if (options.gradient_as_bucket_view) {
    for (const NamedTensor& each : watched) {
      at::Tensor& gradient = each.tensor.mutable_grad();
      if (gradient.defined() && gradient.is_view()) gradient = alias_of(gradient);
    }
  }
  backward = Backward::kEnded;
  if (expects_gradients()) report_left_out();
}

void GradientEngine::Impl::gradient_arrived(size_t index) {
  if (!expects_gradients()) return check_expected(index);
  if (backward == Backward::kAwaited) {
    backward = Backward::kBegun;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this] { backward = Backward::kEnded; });
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled(),
      "backward with create_graph: gradients of gradients are not averaged over ranks");
  if (delayed && (index >= bucketed.size() || index == trigger)) {
    TORCH_CHECK_VALUE(!ready[index], watched[index].name,
                      ": expected one gradient per backward, as delay_all_reduce_named_params "
                      "needs it, got another");
    delayed->arrived();
  }
  ready[index] = true;
}

// A gradient that no forward of the wrapper prepared for would silently stay this rank's own.
void GradientEngine::Impl::check_expected(size_t index) const {
  // That of the last forward's outputs. In no_sync() a loss may lie past them, too.
  const bool of_outputs = graph_task == torch::autograd::get_current_graph_task_id();
  if (last_forward == Forward::kLocal && !(averages && of_outputs) && (of_outputs || !synchronized))
    return;
  TORCH_CHECK_VALUE(false, "rank ", group.rank(), ": ", watched[index].name,
                    " got a gradient that is not averaged: expected one backward after each call "
                    "of the wrapper, and its loss from that call's outputs (the module's own "
                    "forward is for evaluation; no_sync() accumulates)");
}

std::string GradientEngine::Impl::left_out() const {
  std::string names;
  for (size_t i = 0; i < watched.size(); ++i) {
    const bool missing = static_graph == StaticGraph::kKnown ? reducer->awaits(i)
                                                             : !ready[i] && !reducer->is_unused(i);
    if (missing) names += (names.empty() ? "" : ", ") + watched[i].name;
  }
  // All are there, but past the outputs, and so unseen.
  return names.empty() ? "the outputs of forward" : names;
}

// Makes the next forward independent of a backward that is not to be averaged any more.
void GradientEngine::Impl::abandon() {
  backward = Backward::kAwaited;
  group.translate_errors(kReduction, [&] {
    if (delayed) delayed->abandon();
    reducer->abandon_backward();
  });
}

// A second error must not take the place of the first.
void GradientEngine::Impl::restore_after_error(bool counted) noexcept {
  try {
    if (low_precision) low_precision->swap_out();
  } catch (const std::exception& error) {
    TORCH_WARN("parameters stay in low precision: ", error.what());
  }
  // A backward without an error takes this place among the collectives of the other ranks.
  if (counted || !expects_gradients() || backward != Backward::kBegun) return;
  try {
    group.run_collective(kReduction, [] {});
  } catch (const PeerError&) {
    // The next collective throws it again.
  }
}

void GradientEngine::Impl::report_left_out() {
  const std::string names = left_out();
  abandon();
  const char* hint = options.static_graph ? "static_graph expects the same in every step"
                     : searches_unused()  ? "the loss is to be made from the outputs of forward"
                                          : "find_unused_parameters allows for that";
  TORCH_CHECK_VALUE(false, "rank ", group.rank(), ": backward made no gradient for ", names,
                    "; this step's gradients are not averaged (", hint, ")");
}

// After a backward that threw, or that reached parameters past the outputs.
void GradientEngine::Impl::check_finished() {
  if (!expects_gradients()) return;
  if (backward == Backward::kEnded) report_left_out();
  // Else no backward followed, or one whose error the caller has seen.
  if (backward == Backward::kAwaited && !reducer->begun()) return;
  if (low_precision) low_precision->swap_out();
  abandon();
}

}  // namespace cohort::parallel
