// SPDX-License-Identifier: Apache-2.0
// ShardingEngine, forward: what is gathered before a unit runs, what stays after it.
#include <algorithm>
#include <exception>
#include <torch/types.h>

#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/sharding/graph_section.h"
#include "cohort/parallel/sharding/sharding_engine_impl.h"

namespace cohort::parallel {
namespace {

thread_local ShardingEngine* current_engine = nullptr;

}  // namespace

// `direction`: which neighbour in the order of running comes next.
void ShardingEngine::Impl::gather(size_t unit, int direction) {
  for (Bucket* bucket : units[unit].buckets) bucket->flat.begin_gather();
  // The root's backward starts first: prefetch the unit that ran last.
  const size_t place = unit == 0 && direction < 0 ? order.size() : *units[unit].place;
  const size_t next = place + static_cast<size_t>(direction);  // beyond both ends: no unit
  if (options.prefetch && next < order.size()) {
    const Unit& neighbour = units[order[next]];
    const auto is_needed = [&](const Bucket& bucket) {
      if (direction > 0) return !neighbour.ran;
      // Neither units that gradients do not reach nor gradients that are there.
      return neighbour.awaits_backward && (bucket.flat.frozen() || bucket.missing > 0);
    };
    for (Bucket* bucket : neighbour.buckets)
      if (is_needed(*bucket)) bucket->flat.begin_gather();
  }
  for (Bucket* bucket : units[unit].buckets) bucket->flat.gather();
}

// Since the last forward an optimizer or the load of a checkpoint may have written into local
// shards. No rank can tell for sure: libtorch's optimizers write through data(), which no version
// counter sees. So every forward gathers what is trained, except within one step: while gradients
// wait on every rank and no local shard has one, no optimizer has run.
void ShardingEngine::Impl::refresh() {
  clean_up();
  const auto [accumulates, changed] = agree();
  for (const auto& bucket : buckets) {
    FlatBucket& flat = bucket->flat;
    const bool stays = !sharded() && (flat.frozen() ? !changed : accumulates);
    TORCH_CHECK_VALUE(!stays || !flat.changed(), "sharding: the shard of ",
                      flat.parameters().front().name,
                      " was written to while gradients wait since no_sync(): expected the step "
                      "after the backward that synchronizes");
    if (!stays) flat.free();
  }
  // Where parameters are whole, what has changed of them travels while the first units run.
  for (size_t i = 0; i < order.size() && !sharded(); ++i)
    for (Bucket* bucket : units[order[i]].buckets) bucket->flat.begin_gather();
}

// Whether the next forward may find whole parameters as they were. All ranks know alike: their
// forwards are within no_sync together, and all ranks make the sums.
bool ShardingEngine::Impl::may_stay() const {
  const auto frozen = [](const auto& bucket) { return bucket->flat.frozen(); };
  return !sharded() && (may_accumulate || std::ranges::any_of(buckets, frozen));
}

// Ranks may differ in both: one had no batch, or holds nothing of what a checkpoint changed.
ShardingEngine::Impl::Agreement ShardingEngine::Impl::agree() {
  if (!may_stay()) return {.accumulates = false, .frozen_changed = true};
  constexpr int64_t kFrozenVote = int64_t{1} << 32;
  const bool accumulates =
      gradients_wait() && std::ranges::none_of(local_shards, [](const LocalShard& shard) {
        return shard.tensor.grad().defined();
      });
  const bool changed = std::ranges::any_of(
      buckets, [](const auto& bucket) { return bucket->flat.frozen() && bucket->flat.changed(); });
  const int64_t votes = group.all_reduce_sum((accumulates ? 1 : 0) + (changed ? kFrozenVote : 0));
  return {.accumulates = votes % kFrozenVote == group.size(),
          .frozen_changed = votes >= kFrozenVote};
}

bool ShardingEngine::Impl::gradients_wait() const {
  return std::ranges::any_of(buckets, [](const auto& each) { return each->flat.has_gradients(); });
}

void ShardingEngine::Impl::free(size_t unit) {
  if (!sharded()) return;
  for (Bucket* bucket : units[unit].buckets) bucket->flat.free();
}

ShardingEngine* ShardingEngine::current() {
  return current_engine;
}

ShardingEngine::Forward::Forward(ShardingEngine& engine)
    : outer_(std::exchange(current_engine, &engine)),
      engine_(engine),
      exceptions_(std::uncaught_exceptions()) {}

ShardingEngine::Forward::~Forward() {
  current_engine = outer_;
  if (std::uncaught_exceptions() > exceptions_) engine_.impl_->hide();
}

std::optional<size_t> ShardingEngine::find_unit(const torch::nn::Module& block) const {
  const auto found = impl_->unit_of.find(&block);
  return found == impl_->unit_of.end() ? std::nullopt : std::optional(found->second);
}

const std::string& ShardingEngine::forward_label(size_t unit) const {
  return impl_->units[unit].forward_label;
}

uint64_t ShardingEngine::before_forward(size_t unit) {
  Impl& my = *impl_;
  // Its parameters would not be there when the body runs again.
  TORCH_CHECK_VALUE(
      !inside_activation_checkpoint(), "sharding: ", my.units[unit].name,
      " runs inside the body of an activation checkpoint: expected that inside the unit");
  TORCH_CHECK_VALUE(my.unsharded == 0,
                    "sharding: a forward of the wrapped model while unsharded() lives: expected it "
                    "after that, or the module's own forward");
  if (!my.units[unit].place) {
    my.units[unit].place = my.order.size();
    my.order.push_back(unit);
  }
  my.with_unit_context(unit, [&] {
    if (unit == 0) {
      for (const auto& bucket : my.buckets) {
        bucket->flat.check_frozen();
        bucket->flat.check_cleared();
      }
      for (Impl::Unit& each : my.units) each.ran = each.awaits_backward = false;
      my.refresh();
      if (!my.synchronized) my.may_accumulate = true;
    }
    my.units[unit].ran = true;
    my.gather(unit, +1);
  });
  return recording_position();
}

void ShardingEngine::after_forward(size_t unit, const std::vector<at::Tensor*>& outputs,
                                   uint64_t position) {
  Impl& my = *impl_;
  std::vector<at::Tensor> inner;
  for (at::Tensor* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    inner.push_back(*output);
    watch_output(*output, [weak = my.weak_from_this(), unit, name = my.units[unit].name] {
      const auto engine = weak.lock();
      TORCH_CHECK(
          engine, "sharding: a backward through ", name,
          " after the end of its FullyShardedDataParallel: expected that to live until then");
      engine->begin_backward();
      engine->with_unit_context(unit, [&] { engine->gather(unit, -1); });
    });
  }
  const bool has_backward = !inner.empty();
  my.units[unit].awaits_backward = has_backward;
  if (unit == 0) {
    my.order_known = true;
    // What was prefetched for a unit that has not come this time.
    for (size_t i = 0; i < my.units.size(); ++i)
      if (!my.units[i].ran) my.free(i);
  }
  if (unit == 0) my.hide();
  if (!has_backward) return my.free(unit);
  my.watch_passing(unit, inner, position);
  // Backward begins with the whole model and what ran last in it.
  const bool returns = unit == 0 || (my.order_known && unit == my.order.back());
  if (returns || !my.options.reshard_after_forward) return;
  for (Impl::Bucket* bucket : my.units[unit].buckets) bucket->flat.reshard();
}

at::Tensor ShardingEngine::cast_input(const at::Tensor& input) const {
  return parallel::cast_input(impl_->options.mixed_precision, input);
}

at::Tensor ShardingEngine::cast_output(const at::Tensor& output) const {
  return parallel::cast_output(impl_->options.mixed_precision, output);
}

}  // namespace cohort::parallel
