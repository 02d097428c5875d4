// SPDX-License-Identifier: Apache-2.0
// The backward of a sharded model: when gradients travel, and when parameters go.
#include <algorithm>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include "cohort/parallel/sharding/graph_section.h"
#include "cohort/parallel/sharding/sharding_engine_impl.h"

namespace cohort::parallel {

using torch::autograd::Node;
using torch::autograd::variable_list;

void ShardingEngine::Impl::watch_gradients() {
  for (const auto& bucket : buckets) {
    if (bucket->flat.frozen()) continue;
    for (size_t i = 0; i < bucket->flat.parameters().size(); ++i) {
      const NamedTensor& each = bucket->flat.parameters()[i];
      gradient_memory.offer(each.tensor,
                            [flat = &bucket->flat, i] { return flat->gradient_memory(i); });
      const auto accumulator = torch::autograd::impl::grad_accumulator(each.tensor);
      const auto key =
          accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
              [weak = weak_from_this(), at = bucket.get()](const variable_list& outputs,
                                                           const variable_list&) {
                if (const auto engine = weak.lock()) engine->gradient_arrived(*at);
                return outputs;
              }));
      hooks.emplace_back(accumulator, key);
    }
  }
}

// Gradients that arrive free the parameters of other units; for frozen ones none arrive.
void ShardingEngine::Impl::watch_passing(size_t unit, const std::vector<at::Tensor>& outputs,
                                         uint64_t position) {
  if (options.shard != Shard::kParameters || unit == 0 ||
      std::ranges::none_of(units[unit].buckets, [](Bucket* each) { return each->flat.frozen(); }))
    return;
  const std::vector<Node*> nodes = first_nodes(outputs, position);
  const auto run = std::make_shared<Run>(Run{.unit = unit, .num_nodes = nodes.size()});
  for (Node* node : nodes) {
    node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = weak_from_this(), run](const variable_list& gradients, const variable_list&) {
          if (const auto engine = weak.lock()) engine->node_passed(*run);
          return gradients;
        }));
  }
}

void ShardingEngine::Impl::node_passed(Run& run) {
  if (!in_backward) return;
  if (std::exchange(run.backward, num_backwards) != num_backwards) run.left = run.num_nodes;
  if (--run.left > 0) return;
  units[run.unit].awaits_backward = false;
  for (Bucket* bucket : units[run.unit].buckets)
    if (bucket->flat.frozen()) bucket->flat.free();
}

// What this rank has left out of the forward, and of the backward up to `unit`.
std::string ShardingEngine::Impl::left_out(size_t unit) const {
  if (!in_backward) return "";
  const std::string rank = "; rank " + std::to_string(group.rank());
  std::string text;
  for (const Unit& each : units)
    if (each.place && !each.ran) text += rank + " has not run " + each.name;
  for (const auto& bucket : buckets) {
    const bool passed = unit == 0 || units[bucket->unit].place > units[unit].place;
    // In no unit: without a forward_order ranks may use different ones.
    if (!passed || (bucket->unit == 0 && options.forward_order.empty())) continue;
    for (const std::string& name : bucket->flat.absent_gradients())
      text += rank + " has no gradient of " + name;
  }
  return text;
}

// What a backward that threw has left.
void ShardingEngine::Impl::clean_up() {
  if (!in_backward || !alive.expired()) return;
  in_backward = false;
  reductions.clear();
  for (const auto& bucket : buckets) bucket->flat.drop_gradients();
}

// The first that this model sees of one.
void ShardingEngine::Impl::begin_backward() {
  if (in_backward && !alive.expired()) return;
  clean_up();
  TORCH_CHECK_VALUE(unsharded == 0,
                    "sharding: a backward while unsharded() lives: expected it after that");
  in_backward = true;
  has_reduced = false;
  ++num_backwards;
  for (const auto& bucket : buckets) bucket->missing = bucket->flat.parameters().size();
  if (!sharded()) {
    with_unit_context(0, [this] {
      for (const auto& bucket : buckets) bucket->flat.gather();
    });
  }
  const auto life = std::make_shared<bool>();
  alive = life;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this(), life, with_graph = at::GradMode::is_enabled()] {
        if (const auto engine = weak.lock()) engine->finish_backward(with_graph);
      });
}

// A parameter's gradient is there once, after all of the graph that uses the parameter.
void ShardingEngine::Impl::gradient_arrived(Bucket& bucket) {
  const bool with_graph = at::GradMode::is_enabled();
  if (unsharded > 0 || with_graph)
    for (const auto& each : buckets) each->flat.drop_gradients();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !with_graph, "sharding: backward with create_graph: gradients of gradients of parameters, ",
      bucket.flat.parameters().front().name,
      " here, are not supported: expected torch::autograd::grad of the inputs");
  begin_backward();
  if (--bucket.missing > 0) return;
  if (synchronized) {
    with_unit_context(bucket.unit, [&] { reduce(bucket); });
  } else {
    bucket.flat.hold_gradients();
  }
  // What is in no unit may be read until backward ends.
  if (sharded() ? bucket.unit > 0 : synchronized) bucket.flat.free();
}

// Gradients travel while the next ones are computed: of two buckets, so that a short one does not
// wait for a long one; more would hold memory. Where backward gathers, one: the next unit's
// parameters travel behind the sum before, so that a second sum under way would not be waited for any later.
void ShardingEngine::Impl::reduce(Bucket& bucket) {
  const size_t most = sharded() && options.reshard_after_forward ? 1 : 2;
  if (reductions.size() == most) finish_first_reduction();
  bucket.flat.begin_reduce();
  reductions.push_back(&bucket);
  has_reduced = true;
}

void ShardingEngine::Impl::finish_first_reduction() {
  Bucket& first = *reductions.front();
  reductions.pop_front();
  first.flat.finish_reduce();
}

// `with_graph`: another backward through this one's graph may follow.
void ShardingEngine::Impl::finish_backward(bool with_graph) {
  with_unit_context(0, [this] {
    for (const auto& bucket : buckets)
      if (synchronized && bucket->missing > 0 && bucket->flat.has_gradients()) reduce(*bucket);
    while (!reductions.empty()) finish_first_reduction();
  });
  for (const auto& bucket : buckets) bucket->flat.finish_replication();
  finish_copies();
  if (has_reduced) {
    with_unit_context(0, [this] { drop_unused(); });
    may_accumulate = false;
  }
  for (const auto& bucket : buckets) {
    if (!synchronized) bucket->flat.hold_gradients();
    // Whole parameters are gathered again once a step may have come.
    if (sharded() || (has_reduced && !bucket->flat.frozen())) {
      bucket->flat.free();
    } else if (!with_graph) {
      bucket->flat.hide();
    }
  }
  in_backward = false;
}

// The optimizer reads them on the host. Copies back to back on one stream: one wait is for all.
void ShardingEngine::Impl::finish_copies() {
  const auto copying =
      std::ranges::find_if(buckets, [](const auto& each) { return each->flat.copying(); });
  if (copying == buckets.end()) return;
  const c10::Device device = (*copying)->flat.device();
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  for (const auto& bucket : buckets) bucket->flat.finish_copy();
}

// A parameter that no rank has used has no gradient, as in one process: by zeros an optimizer with
// moments would move it. One number is exchanged, and more only where a gradient is missing.
void ShardingEngine::Impl::drop_unused() {
  const auto sum = [this](at::Tensor numbers) {
    group.all_reduce(numbers);
    if (options.replicate_group) options.replicate_group.all_reduce(numbers);
    return numbers;
  };
  std::vector<int64_t> own;
  for (const auto& bucket : buckets)
    own.insert(own.end(), bucket->flat.sent().begin(), bucket->flat.sent().end());
  at::Tensor used = at::tensor(own, at::kLong);
  const int64_t num_unused = std::ranges::count(own, 0);
  if (sum(at::full({1}, num_unused, at::kLong)).item<int64_t>() > 0) sum(used);
  const int64_t* next = used.const_data_ptr<int64_t>();
  for (const auto& bucket : buckets) {
    const size_t count = bucket->flat.sent().size();
    if (count > 0) bucket->flat.drop_unused(next);
    next += count;
  }
}

}  // namespace cohort::parallel
