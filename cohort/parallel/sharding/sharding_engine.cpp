// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/sharding_engine.h"

#include <map>
#include <torch/types.h>

#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/sharding/sharding_engine_impl.h"
#include "cohort/parallel/sharding/sync_initial_state.h"

namespace cohort::parallel {

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
  const auto pool = std::make_shared<BufferPool>();
  for (UnitParameters& each : divide_into_units(model, modules, ignored, options.forward_order)) {
    Unit unit{.name = "unit " + each.name, .buckets = {}, .place = {}};
    unit_of.emplace(each.module, units.size());
    if (units.empty()) unit.name = "the parameters of no unit";
    unit.forward_label =
        units.empty() ? "FullyShardedDataParallel.forward" : "forward " + unit.name;
    for (auto& parameters : each.buckets) {
      const BucketPlace place{.name = unit.name + ", " + parameters.front().name + " and on",
                              .reshard_group = reshard_group,
                              .pool = pool};
      buckets.push_back(std::make_unique<Bucket>(Bucket{
          .flat = FlatBucket(std::move(parameters), group, options, place), .unit = units.size()}));
      unit.buckets.push_back(buckets.back().get());
    }
    units.push_back(std::move(unit));
  }
  for (const auto& bucket : buckets)
    local_shards.insert(local_shards.end(), bucket->flat.local_shards().begin(),
                        bucket->flat.local_shards().end());
  std::map<const at::TensorImpl*, std::string> first_names;
  for (const auto& item : model.named_parameters()) {
    const auto [first, is_new] =
        first_names.emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (!is_new) further_names.emplace(first->second, item.key());
  }
}

void ShardingEngine::Impl::hide() {
  if (unsharded > 0) return;
  for (const auto& bucket : buckets) bucket->flat.hide();
}

// Local shards under every name of their parameters.
std::vector<LocalShard> ShardingEngine::Impl::sharded_state() const {
  std::vector<LocalShard> state = local_shards;
  for (const LocalShard& shard : local_shards) {
    const auto [begin, end] = further_names.equal_range(shard.name);
    for (auto further = begin; further != end; ++further) {
      state.push_back(shard);
      state.back().name = further->second;
    }
  }
  return state;
}

// Buffers and ignored parameters.
std::vector<LocalShard> ShardingEngine::Impl::unsharded_state() const {
  std::vector<NamedTensor> whole;
  for (const auto& item : model.named_parameters())
    if (contains(ignored, item.key())) whole.push_back({item.key(), item.value()});
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

void ShardingEngine::set_synchronized(bool on) {
  impl_->synchronized = on;
  for (const auto& bucket : impl_->buckets) bucket->flat.accept_gradients(on);
}

void ShardingEngine::drop_waiting_gradients() {
  for (const auto& bucket : impl_->buckets) bucket->flat.drop_gradients();
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
      current() != this,
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
  return impl_->group.rank() == 0 ? state_to_load() : impl_->sharded_state();
}

std::vector<LocalShard> ShardingEngine::state_to_load() const {
  std::vector<LocalShard> state = impl_->sharded_state();
  for (LocalShard& each : impl_->unsharded_state()) state.push_back(std::move(each));
  return state;
}

bool ShardingEngine::shows_copies() const {
  return impl_->unsharded > 0;
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
