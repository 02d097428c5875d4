// The backward of a sharded model: when gradients travel, and when parameters go.
#include <algorithm>
#include <cmath>
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
    for (const NamedTensor& each : bucket->flat.parameters()) {
      const auto accumulator = torch::autograd::impl::grad_accumulator(each.tensor);
      const auto key =
          accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
              [this, at = bucket.get()](const variable_list& outputs, const variable_list&) {
                gradient_arrived(*at);
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
        [this, run](const variable_list& gradients, const variable_list&) {
          node_passed(*run);
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
    if (!passed || bucket->unit == 0) continue;
    for (const std::string& name : bucket->flat.absent_gradients())
      text += rank + " has no gradient of " + name;
  }
  return text;
}

// Before a call of ShardingEngine::backward, which divides the loss or does not.
void ShardingEngine::Impl::check_backward(bool divides) const {
  TORCH_CHECK_VALUE(summoned == 0,
                    "sharding: a backward between summon() and release(): expected it after "
                    "release()");
  const bool waiting =
      std::ranges::any_of(buckets, [](const auto& each) { return each->flat.has_gradients(); });
  TORCH_CHECK_VALUE(divides == loss_divided || !waiting,
                    "sharding: gradients that wait since no_sync() are of one model's loss, these "
                    "of several models', or the other way round: expected backward of the same "
                    "models until the one that synchronizes");
}

void ShardingEngine::Impl::enter_backward(bool divides) {
  abandon_backward();
  loss_divided = divides;
  may_backward = true;
}

void ShardingEngine::Impl::leave_backward(bool threw) {
  may_backward = false;
  if (!threw) return;
  abandon_backward();
  for (const auto& bucket : buckets) bucket->flat.drop_gradients();
}

// The first that this model sees of one.
void ShardingEngine::Impl::begin_backward() {
  if (std::exchange(in_backward, true)) return;
  ++num_backwards;
  for (const auto& bucket : buckets) bucket->missing = bucket->flat.parameters().size();
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
}

// A parameter's gradient is there once, after all of the graph that uses the parameter.
void ShardingEngine::Impl::gradient_arrived(Bucket& bucket) {
  if (!may_backward) bucket.flat.drop_gradients();
  TORCH_CHECK_VALUE(may_backward, "sharding: a gradient of ", bucket.flat.parameters().front().name,
                    " comes from a backward that its model was not told of: expected "
                    "ShardedDataParallel::backward(loss), or parallel::backward(loss, a, b) of all "
                    "sharded models in one loss, got loss.backward() or another model's backward");
  begin_backward();
  if (--bucket.missing > 0) return;
  if (synchronized) {
    together(bucket.unit, [&] { reduce(bucket); });
  } else {
    bucket.flat.hold_gradients();
  }
  bucket.flat.free();
}

// One bucket's gradients travel while the next one's are computed; more would hold memory.
void ShardingEngine::Impl::reduce(Bucket& bucket) {
  if (reduction) reduction->flat.finish_reduce();
  bucket.flat.begin_reduce(loss_divided ? 1 : share());
  reduction = &bucket;
}

// Of one rank in the mean.
double ShardingEngine::Impl::share() const {
  return 1.0 / (group.size() * (options.replicate_group ? options.replicate_group->size() : 1));
}

// Where the division rounds nothing, that of the loss saves a pass over all gradients. Ignored
// parameters' are not divided.
bool ShardingEngine::Impl::divides_loss() const {
  const auto wide = [](at::ScalarType type) { return type == at::kFloat || type == at::kDouble; };
  const MixedPrecision& types = options.mixed_precision;
  int exponent = 0;
  return ignored.empty() && std::frexp(share(), &exponent) == 0.5 &&
         wide(types.param_dtype.value_or(at::kFloat)) &&
         wide(types.reduce_dtype.value_or(at::kFloat)) &&
         std::ranges::all_of(buckets,
                             [&](const auto& each) { return wide(each->flat.kept_type()); });
}

void ShardingEngine::Impl::finish_backward() {
  together(0, [this] {
    for (const auto& bucket : buckets)
      if (synchronized && bucket->missing > 0 && bucket->flat.has_gradients()) reduce(*bucket);
    if (reduction) reduction->flat.finish_reduce();
  });
  reduction = nullptr;
  for (const auto& bucket : buckets) {
    bucket->flat.settle();
    if (!synchronized) bucket->flat.hold_gradients();
    bucket->flat.free();
  }
  in_backward = false;
}

// What a backward that threw has left.
void ShardingEngine::Impl::abandon_backward() {
  in_backward = false;
  reduction = nullptr;
}

void ShardingEngine::backward(const at::Tensor& loss, const at::Tensor& gradient) {
  Impl& my = *impl_;
  at::Tensor seed = gradient;
  const bool divides = my.divides_loss();
  if (divides) seed = gradient.defined() ? gradient * my.share() : at::full_like(loss, my.share());
  my.check_backward(divides);
  my.enter_backward(divides);
  try {
    loss.backward(seed);
  } catch (...) {
    my.leave_backward(/*threw=*/true);
    throw;
  }
  my.leave_backward(/*threw=*/false);
}

// The models may differ in who shares them out: each divides its gradients.
void ShardingEngine::backward(const at::Tensor& loss, const std::vector<ShardingEngine*>& engines) {
  for (const ShardingEngine* each : engines) each->impl_->check_backward(/*divides=*/false);
  for (ShardingEngine* each : engines) each->impl_->enter_backward(/*divides=*/false);
  const auto leave = [&](bool threw) {
    for (ShardingEngine* each : engines) each->impl_->leave_backward(threw);
  };
  try {
    loss.backward();
  } catch (...) {
    leave(/*threw=*/true);
    throw;
  }
  leave(/*threw=*/false);
}

}  // namespace cohort::parallel
