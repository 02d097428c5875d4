#include "cohort/parallel/sharding/sharding_engine.h"

#include <algorithm>
#include <exception>
#include <map>
#include <torch/types.h>

#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/sharding/graph_section.h"
#include "cohort/parallel/sharding/sharding_engine_impl.h"
#include "cohort/parallel/sharding/sync_initial_state.h"

namespace cohort::parallel {
namespace {

thread_local ShardingEngine* current_engine = nullptr;

}  // namespace

ShardingEngine::Impl::~Impl() {
  for (const auto& [accumulator, key] : hooks) accumulator->del_post_hook(key);
}

void ShardingEngine::Impl::fill_deferred() {
  const at::NoGradGuard no_grad;
  std::map<const at::TensorImpl*, std::pair<FlatBucket*, size_t>> waiting;
  for (const auto& bucket : buckets) {
    FlatBucket& flat = bucket->flat;
    for (size_t i = 0; flat.deferred() && i < flat.parameters().size(); ++i)
      waiting[flat.parameters()[i].tensor.unsafeGetTensorImpl()] = {&flat, i};
  }
  const auto filled = [this](const std::string& name, c10::IntArrayRef sizes,
                             const at::TensorOptions& kind) {
    at::Tensor value = at::zeros(sizes, kind.device(options.fill_device).requires_grad(false));
    const at::Tensor before = value;
    options.fill(name, value);
    TORCH_CHECK_VALUE(value.is_same(before) && value.sizes() == sizes,
                      "sharding: expected fill to write into the tensor of ", name);
    return value;
  };
  const auto fill_whole = [&](const NamedTensor& each) {
    if (!each.tensor.is_meta()) return;
    set_data(each.tensor, filled(each.name, each.tensor.sizes(), each.tensor.options()));
  };
  for (const NamedTensor& each : all_parameters(model)) {
    const auto found = waiting.find(each.tensor.unsafeGetTensorImpl());
    if (found == waiting.end()) {
      fill_whole(each);
      continue;
    }
    const auto [bucket, index] = found->second;
    bucket->place(index, filled(each.name, each.tensor.sizes(),
                                each.tensor.options().dtype(bucket->kept_type())));
  }
  for (const NamedTensor& each : model_buffers(model)) fill_whole(each);
}

void ShardingEngine::Impl::cast_buffers() {
  const auto& type = options.mixed_precision.buffer_dtype;
  if (!type) return;
  for (const NamedTensor& buffer : model_buffers(model, ignored))
    buffer.tensor.set_data(cast_floating(buffer.tensor, *type));
}

void ShardingEngine::Impl::make_units(const std::vector<torch::nn::Module*>& modules) {
  reshard_group = make_reshard_group(group, options);
  for (UnitParameters& each : divide_into_units(model, modules, ignored)) {
    Unit unit{.module = each.module, .name = "unit " + each.name, .buckets = {}, .place = {}};
    if (units.empty()) unit.name = "the parameters of no unit";
    unit.forward_label =
        units.empty() ? "FullyShardedDataParallel.forward" : "forward " + unit.name;
    for (auto& parameters : each.buckets) {
      const BucketPlace place{.name = unit.name + ", " + parameters.front().name + " and on",
                              .reshard_group = reshard_group};
      buckets.push_back(std::make_unique<Bucket>(Bucket{
          .flat = FlatBucket(std::move(parameters), group, options, place), .unit = units.size()}));
      unit.buckets.push_back(buckets.back().get());
    }
    units.push_back(std::move(unit));
  }
  for (const auto& bucket : buckets)
    local_shards.insert(local_shards.end(), bucket->flat.local_shards().begin(),
                        bucket->flat.local_shards().end());
}

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

// Ranks may differ in both: one had no batch, or holds nothing of what a checkpoint changed.
ShardingEngine::Impl::Agreement ShardingEngine::Impl::agree() {
  if (sharded()) return {.accumulates = false, .frozen_changed = true};
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

void ShardingEngine::Impl::hide() {
  if (unsharded > 0) return;
  for (const auto& bucket : buckets) bucket->flat.hide();
}

// Buffers and ignored parameters.
std::vector<LocalShard> ShardingEngine::Impl::unsharded_state() const {
  std::vector<NamedTensor> whole;
  for (const NamedTensor& each : all_parameters(model))
    if (contains(ignored, each.name)) whole.push_back(each);
  for (const NamedTensor& each : model_buffers(model)) whole.push_back(each);
  std::vector<LocalShard> result;
  for (const auto& [name, tensor, sparse] : whole)
    result.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor.detach()});
  return result;
}

ShardingEngine::ShardingEngine(std::shared_ptr<torch::nn::Module> model,
                               const ShardingGroups& groups, const ShardingOptions& options,
                               const std::vector<torch::nn::Module*>& units)
    : impl_(std::make_shared<Impl>(std::move(model), groups.shard,
                                   ShardingEngineOptions{options, groups.replicate})) {
  sync_initial_state(impl_->model, groups.shard, impl_->options, impl_->ignored);
  impl_->make_units(units);
  impl_->fill_deferred();
  impl_->cast_buffers();
  impl_->watch_gradients();
  impl_->hide();
}

ShardingEngine::~ShardingEngine() = default;

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
  for (size_t i = 0; i < impl_->units.size(); ++i)
    if (impl_->units[i].module == &block) return i;
  return std::nullopt;
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
      for (const auto& bucket : my.buckets) bucket->flat.check_frozen();
      for (Impl::Unit& each : my.units) each.ran = each.awaits_backward = false;
      my.refresh();
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

bool ShardingEngine::set_synchronized(bool on) {
  return std::exchange(impl_->synchronized, on);
}

const std::vector<LocalShard>& ShardingEngine::local_shards() const {
  return impl_->local_shards;
}

std::vector<std::pair<std::string, at::Tensor>> ShardingEngine::named_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const LocalShard& shard : local_shards())
    if (shard.tensor.requires_grad()) named.emplace_back(shard.name, shard.tensor);
  return named;
}

void ShardingEngine::unshard() {
  Impl& my = *impl_;
  TORCH_CHECK_VALUE(
      current_engine != this,
      "sharding: unsharded() inside a forward of the wrapped model: expected it outside");
  if (my.unsharded == 0) {
    my.with_unit_context(0, [&] {
      my.refresh();
      for (const auto& bucket : my.buckets) bucket->flat.begin_unshard();
      for (const auto& bucket : my.buckets) bucket->flat.unshard();
    });
  }
  ++my.unsharded;
}

void ShardingEngine::reshard(bool write_back) {
  Impl& my = *impl_;
  --my.unsharded;
  for (const auto& bucket : my.buckets) {
    if (write_back) bucket->flat.keep_written();
    if (my.unsharded > 0) continue;
    // What was kept differs from what the other ranks gathered.
    my.sharded() || write_back ? bucket->flat.free() : bucket->flat.hide();
  }
}

std::vector<LocalShard> ShardingEngine::state_to_save() const {
  return impl_->group.rank() == 0 ? state_to_load() : impl_->local_shards;
}

std::vector<LocalShard> ShardingEngine::state_to_load() const {
  std::vector<LocalShard> state = impl_->local_shards;
  for (LocalShard& each : impl_->unsharded_state()) state.push_back(std::move(each));
  return state;
}

int64_t ShardingEngine::num_units() const {
  return std::ssize(impl_->units);
}

comm::ProcessGroup ShardingEngine::group() const {
  return impl_->group;
}

bool ShardingEngine::is_first_replica() const {
  const comm::ProcessGroup& replicas = impl_->options.replicate_group;
  return !replicas || replicas.rank() == 0;
}

}  // namespace cohort::parallel
