// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/flat_bucket.h"

#include <ATen/ScalarOps.h>
#include <algorithm>
#include <c10/core/Allocator.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>
#include <utility>

#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/profiler.h"
#include "cohort/comm/shared_tensor.h"

namespace cohort::parallel {
namespace {

// Elements. A multiple of every vector's length: where kernels treat the last few elements of a
// tensor in another way than the rest, as libtorch's fused Adam does, its parts end as the whole.
constexpr int64_t kAlignment = 16;

std::vector<FlatTensor> places_of(const std::vector<NamedTensor>& parameters) {
  std::vector<FlatTensor> places;
  for (const NamedTensor& each : parameters)
    places.push_back(
        {.name = each.name, .shape = each.tensor.sizes().vec(), .numel = each.tensor.numel()});
  return places;
}

// StorageImpl can refuse access with a text of one's own, and has no function to allow it again. An
// explicit instantiation may name what is private.
template <class Tag, auto Member>
struct PrivateMember {
  friend constexpr auto member_of(Tag) { return Member; }
};
struct RefusesAccess {
  friend constexpr auto member_of(RefusesAccess);
};
template struct PrivateMember<RefusesAccess, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

// Memory leaves a tensor, and comes back, without its views' notice. Without this refusal kernels
// read through the null pointer.
void drop_memory(at::Tensor& tensor, const std::string& refusal) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(refusal);
}

void take_memory(at::Tensor& tensor, at::Tensor&& from) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->*member_of(RefusesAccess()) = false;
  storage->set_data_ptr_noswap(
      from.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, tensor.device())));
}

// A tensor for which memory is to come; views of it can be made.
at::Tensor without_memory(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty({0}, options);
  const auto numel = static_cast<size_t>(c10::multiply_integers(sizes));
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(numel * tensor.element_size());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// A tensor for which memory never comes: who asks for it gets `refusal`.
at::Tensor absent(const FlatTensor& place, const at::TensorOptions& options,
                  const std::string& refusal) {
  at::Tensor tensor = without_memory(place.shape, options);
  drop_memory(tensor, refusal);
  return tensor;
}

at::Tensor absent_parameter(const FlatTensor& place, const at::TensorOptions& options,
                            bool sharded) {
  return absent(
      place, options,
      "sharding: " + place.name +
          (sharded ? " is sharded, and whole only while its unit runs"
                   : " is updated in parts, and whole only in forward and backward") +
          ": expected it to be used in the forward of the wrapped model, within its unit if it has "
          "one (a penalty on it, too), and to be read elsewhere while unsharded() lives. An "
          "optimizer that holds it was made from the module's own parameters, which "
          "FullyShardedDataParallel has taken: make it from the wrapped model's parameters(), "
          "after wrapping. A module whose wrapper is gone keeps no values: wrap a new one");
}

// Without it an optimizer made from the module's own parameters would skip them all, and train
// nothing.
at::Tensor absent_gradient(const FlatTensor& place, const at::TensorOptions& options) {
  return absent(
      place, options,
      "sharding: the gradient of " + place.name +
          " is in the ranks' local shards: expected the optimizer to be made from the wrapped "
          "model's parameters(), its zero_grad(), and parallel::clip_grad_norm_ of the "
          "wrapped model");
}

}  // namespace

void set_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (!tensor.is_meta()) {
    // Of another type, set_data forgets the accumulator, and with it the hooks that hang there.
    const auto accumulator = tensor.scalar_type() == data.scalar_type()
                                 ? nullptr
                                 : torch::autograd::impl::try_get_grad_accumulator(tensor);
    tensor.set_data(data);
    if (accumulator) comm::set_grad_accumulator(tensor, accumulator);
    return;
  }
  // Tensor::set_data does not lead away from the meta device.
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

FlatBucket::FlatBucket(std::vector<NamedTensor> parameters, const comm::ProcessGroup& group,
                       const ShardingEngineOptions& options, BucketPlace where)
    : group_(group),
      options_(options),
      place_(std::move(where)),
      parameters_(std::move(parameters)),
      frozen_(!parameters_.front().tensor.requires_grad()),
      deferred_(parameters_.front().tensor.is_meta()),
      layout_(places_of(parameters_), group.size(), kAlignment) {
  const at::NoGradGuard no_grad;
  auto kept = parameters_.front().tensor.options().requires_grad(false);
  if (deferred_) kept = kept.device(options_.fill_device);
  auto computed = kept;
  if (options_.mixed_precision.param_dtype && at::isFloatingType(kept.dtype().toScalarType()))
    computed = kept.dtype(*options_.mixed_precision.param_dtype);
  own_memory_ = sharded() || options_.cpu_offload || computed.dtype() != kept.dtype();
  full_ = sharded() ? without_memory({layout_.padded_numel()}, computed)
                    : comm::empty_shared(group_, layout_.padded_numel(), computed).zero_();
  if (own_memory_) {
    const bool pinned = options_.cpu_offload && !kept.device().is_cpu();
    if (options_.cpu_offload) kept = kept.device(at::kCPU).pinned_memory(pinned);
    shard_ = comm::empty_shared(group_, layout_.shard_numel(), kept).zero_();
  } else {
    shard_ = own_part(full_);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const FlatTensor& flat = layout_.tensors()[i];
    const at::Tensor& parameter = parameters_[i].tensor;
    TORCH_CHECK_VALUE(parameter.is_contiguous(), "sharding: ", flat.name, " ", parameter.sizes(),
                      " has strides ", parameter.strides(),
                      ": expected a contiguous parameter, for ranks hold elements counted row by "
                      "row (inputs may be channels_last)");
    if (!deferred_) place(i, parameter);
    views_.push_back(view_of(full_, flat));
    absent_.push_back(absent_parameter(flat, computed, sharded()));
    if (!frozen_) absent_gradients_.push_back(absent_gradient(flat, computed));
  }
  if (sharded()) {
    free();
  } else {
    content_ = Content::kWhole;
    gather();
  }

  for (const FlatSlice& slice : layout_.slices(group_.rank())) {
    const FlatTensor& place = layout_.tensors()[slice.tensor];
    at::Tensor tensor = shard_.narrow(0, slice.offset, slice.end - slice.begin);
    tensor.set_requires_grad(!frozen_);
    local_shards_.push_back({place.name, place.shape, slice.begin, slice.end, tensor});
  }
}

void FlatBucket::place(size_t index, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  if (!sharded()) view_of(full_, layout_.tensors()[index]).copy_(value);
  for (const FlatSlice& slice : layout_.slices(group_.rank())) {
    if (!own_memory_ || slice.tensor != index) continue;
    const int64_t count = slice.end - slice.begin;
    shard_.narrow(0, slice.offset, count).copy_(value.reshape({-1}).narrow(0, slice.begin, count));
  }
  gathered_version_ = static_cast<int64_t>(shard_._version());
}

at::Tensor FlatBucket::view_of(const at::Tensor& flat, const FlatTensor& place) const {
  return flat.narrow(0, place.begin, place.numel).view(place.shape);
}

at::Tensor FlatBucket::own_part(const at::Tensor& flat) const {
  return flat.narrow(0, group_.rank() * layout_.shard_numel(), layout_.shard_numel());
}

// Before any cast: on the host that would be the host's work, into memory that is not pinned.
at::Tensor FlatBucket::on_device(const at::Tensor& shard) const {
  return shard.to(full_.device(), shard.scalar_type(), /*non_blocking=*/true);
}

// For what comes and goes within a step, where the other ranks of `group`'s host can read it. Under
// kOptimizer the buffer of a sum becomes the gradients: the pool would keep that memory beside all
// activations.
at::Tensor FlatBucket::buffer(const comm::ProcessGroup& group, int64_t numel,
                              at::ScalarType type) const {
  const at::TensorOptions options = full_.options().dtype(type);
  return options_.shard == Shard::kOptimizer ? comm::empty_shared(group, numel, options)
                                             : place_.pool->empty(group, numel, options);
}

// In the type of computing.
at::Tensor FlatBucket::shard_to_send() const {
  const at::Tensor shard = on_device(shard_);
  if (shard.scalar_type() == full_.scalar_type()) return shard;
  return buffer(group_, shard.numel(), full_.scalar_type()).copy_(shard);
}

void FlatBucket::begin_gather() {
  if (content_ != Content::kStale) return;
  // Of its own memory: nobody sees it before all of it is there.
  start_gather(sharded() ? buffer(group_, full_.numel(), full_.scalar_type()) : full_);
}

void FlatBucket::start_gather(const at::Tensor& arriving) {
  const std::string label = "gather " + place_.name;
  const ProfileScope scope(label);
  const at::NoGradGuard no_grad;
  const bool among_neighbours = kept_.defined();
  const at::Tensor sent = among_neighbours ? std::exchange(kept_, at::Tensor()) : shard_to_send();
  const comm::ProcessGroup& group = among_neighbours ? place_.reshard_group : group_;
  comm::Work work = group.all_gather_into_async(arriving, sent, place_.name);
  gathering_.emplace(Gathering{sent, arriving, std::move(work)});
  content_ = Content::kGathering;
}

void FlatBucket::gather() {
  begin_gather();
  finish_gather();
  for (size_t i = 0; i < parameters_.size(); ++i) show(i, views_[i]);
}

void FlatBucket::show(size_t index, const at::Tensor& value) {
  hidden_ = false;
  set_data(parameters_[index].tensor, value);
  if (!gradient(index).defined()) parameters_[index].tensor.mutable_grad().reset();
}

// All units together, into memory that goes back afterwards: what ranks share stays.
void FlatBucket::begin_unshard() {
  const at::NoGradGuard no_grad;
  place_.pool->release_free();
  if (full_.scalar_type() == kept_type()) {
    if (content_ == Content::kStale) start_gather(sharded() ? at::empty_like(full_) : full_);
    return;
  }
  const at::Tensor sent = on_device(shard_);
  at::Tensor arriving = at::empty(full_.sizes(), full_.options().dtype(kept_type()));
  comm::Work work = group_.all_gather_into_async(arriving, sent, place_.name);
  unsharding_.emplace(Gathering{sent, arriving, std::move(work)});
}

void FlatBucket::unshard() {
  if (full_.scalar_type() == kept_type()) return gather();
  auto gathering = std::exchange(unsharding_, std::nullopt);
  gathering->work.wait();
  unsharded_ = std::move(gathering->arriving);
  for (size_t i = 0; i < parameters_.size(); ++i)
    show(i, view_of(unsharded_, layout_.tensors()[i]));
}

void FlatBucket::finish_gather() {
  auto gathering = std::exchange(gathering_, std::nullopt);
  if (!gathering) return;
  const std::string label = "gather.wait " + place_.name;
  const ProfileScope scope(label);
  gathering->work.wait();
  if (sharded()) take_memory(full_, std::move(gathering->arriving));
  content_ = Content::kWhole;
  gathered_version_ = static_cast<int64_t>(shard_._version());
}

void FlatBucket::hide() {
  hidden_ = true;
  unsharded_.reset();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    set_data(parameters_[i].tensor, absent_[i]);
    if (!frozen_ && !gradient(i).defined())
      parameters_[i].tensor.mutable_grad() = absent_gradients_[i];
  }
}

at::Tensor FlatBucket::gradient(size_t index) const {
  const at::Tensor& gradient = parameters_[index].tensor.grad();
  const bool absent = !frozen_ && gradient.is_same(absent_gradients_[index]);
  return absent ? at::Tensor() : gradient;
}

void FlatBucket::free() {
  kept_.reset();
  finish_gather();
  hide();
  if (sharded()) {
    drop_memory(full_, "sharding: a view of a parameter of " + place_.name +
                           ", is read while they are sharded: expected the unit to return what "
                           "is computed with them for a loss (an auxiliary loss that is kept in a "
                           "member), so that backward gathers them first");
  }
  content_ = Content::kStale;
}

void FlatBucket::reshard() {
  if (!sharded()) return;
  if (!place_.reshard_group || content_ == Content::kStale) return free();
  const at::NoGradGuard no_grad;
  finish_gather();
  const int64_t part = layout_.padded_numel() / place_.reshard_group.size();
  at::Tensor kept = buffer(place_.reshard_group, part, full_.scalar_type())
                        .copy_(full_.narrow(0, place_.reshard_group.rank() * part, part));
  free();
  kept_ = std::move(kept);
}

void FlatBucket::keep_written() {
  const at::NoGradGuard no_grad;
  const at::Tensor own = own_part(unsharded_.defined() ? unsharded_ : full_);
  if (own.data_ptr() != shard_.data_ptr()) shard_.copy_(own);
  gathered_version_ = static_cast<int64_t>(shard_._version());
}

bool FlatBucket::has_gradients() const {
  if (held_.defined()) return true;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (gradient(i).defined()) return true;
  return false;
}

std::vector<std::string> FlatBucket::absent_gradients() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (has_gradients() && !gradient(i).defined()) names.push_back(parameters_[i].name);
  return names;
}

void FlatBucket::check_cleared() const {
  const auto slices = layout_.slices(group_.rank());
  for (size_t i = 0; hidden_ && !frozen_ && i < slices.size(); ++i) {
    TORCH_CHECK_VALUE(parameters_[slices[i].tensor].tensor.grad().defined() ||
                          !local_shards_[i].tensor.grad().defined(),
                      "sharding: the module's own zero_grad() has not cleared the gradient of ",
                      local_shards_[i].name,
                      ", which is in the ranks' local shards: expected the optimizer's "
                      "zero_grad(), of one that is made from the wrapped model's parameters()");
  }
}

void FlatBucket::drop_gradients() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (gradient(i).defined()) parameters_[i].tensor.mutable_grad().reset();
  held_.reset();
  gradients_.reset();
  had_.clear();
  sent_.clear();
  if (reduction_) reduction_->work.wait();
  reduction_.reset();
  if (replication_) replication_->work.wait();
  replication_.reset();
  copied_.reset();
}

void FlatBucket::check_frozen() const {
  if (!frozen_) return;
  for (const NamedTensor& each : parameters_)
    TORCH_CHECK_VALUE(!each.tensor.requires_grad(), "sharding: ", each.name,
                      " requires a gradient, but was frozen when the model was sharded: expected "
                      "it to be thawed before");
}

at::Tensor FlatBucket::dense_gradient(size_t index) const {
  at::Tensor dense = gradient(index);
  TORCH_CHECK_VALUE(!dense.defined() || !dense.is_sparse(), "sharding: ", parameters_[index].name,
                    " has a sparse gradient: expected dense ones");
  return dense;
}

void FlatBucket::hold_gradients() {
  if (full_.scalar_type() == travel_type()) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor gradient = dense_gradient(i);
    if (!gradient.defined()) continue;
    // Lives on between steps: no memory of the pool, which would keep it afterwards.
    if (!held_.defined()) {
      held_ =
          comm::empty_shared(group_, layout_.padded_numel(), full_.options().dtype(travel_type()))
              .zero_();
    }
    view_of(held_, layout_.tensors()[i]).add_(gradient);
    had_.resize(parameters_.size());
    had_[i] = true;
    parameters_[i].tensor.mutable_grad().reset();
  }
}

// A half type's sum might leave its range: there, terms are divided before. Else this rank's shard
// of the sum is.
comm::ReduceOp FlatBucket::reduction_op() const {
  return c10::elementSize(travel_type()) < 4 ? comm::ReduceOp::kSum : comm::ReduceOp::kAvg;
}

// Of each term.
double FlatBucket::factor() const {
  if (reduction_op() == comm::ReduceOp::kAvg) return 1;
  return 1.0 / (group_.size() * (options_.replicate_group ? options_.replicate_group.size() : 1));
}

at::Tensor FlatBucket::gradient_memory(size_t index) {
  if (!accepts_gradients_ || held_.defined() || factor() != 1 || !full_.is_cpu() ||
      full_.scalar_type() != travel_type())
    return {};
  const at::NoGradGuard no_grad;
  if (!gradients_.defined()) gradients_ = buffer(group_, layout_.padded_numel(), travel_type());
  return alias_of(view_of(gradients_, layout_.tensors()[index]));
}

// The gradients times factor() in one buffer; the parameters have none any more.
at::Tensor FlatBucket::take_gradients() {
  const double each = factor();
  const auto scaled = [each](at::Tensor tensor) { return each == 1 ? tensor : tensor.mul_(each); };
  if (held_.defined()) {
    hold_gradients();
    sent_ = std::exchange(had_, {});
    return scaled(std::exchange(held_, at::Tensor()));
  }
  sent_.assign(parameters_.size(), false);
  const auto type = travel_type();
  at::Tensor whole = gradients_.defined() ? std::exchange(gradients_, at::Tensor())
                                          : buffer(group_, layout_.padded_numel(), type);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor place = view_of(whole, layout_.tensors()[i]);
    const at::Tensor gradient = dense_gradient(i);
    sent_[i] = gradient.defined();
    if (!gradient.defined()) {
      place.zero_();
    } else if (gradient.is_alias_of(place)) {
      // Backward has written it here.
    } else if (each != 1 && gradient.element_size() > place.element_size()) {
      place.copy_(gradient * each);  // in the wider type, whose range is the larger one
    } else if (each != 1 && gradient.scalar_type() == type) {
      // A factor that is not rounded to the gradient's type.
      at::mul_out(place, gradient, at::native::wrapped_scalar_tensor(each));
    } else {
      scaled(place.copy_(gradient));
    }
    parameters_[i].tensor.mutable_grad().reset();
  }
  for (const auto& [begin, end] : layout_.gaps()) whole.narrow(0, begin, end - begin).zero_();
  return whole;
}

void FlatBucket::begin_reduce() {
  const std::string label = "reduce " + place_.name;
  const ProfileScope scope(label);
  const at::NoGradGuard no_grad;
  const at::Tensor whole = take_gradients();
  // Where gradients are whole, this rank's shard of the sum is written in place. Elsewhere the rest
  // is freed. The sum is the gradient, unless that has another type.
  at::Tensor part = own_part(whole);
  if (options_.shard != Shard::kOptimizer) {
    const comm::ProcessGroup& next = options_.replicate_group;
    if (part.scalar_type() != shard_.scalar_type()) {
      part = buffer(next ? next : group_, part.numel(), part.scalar_type());
    } else {
      part = next ? comm::empty_shared(next, part.numel(), part.options()) : at::empty_like(part);
    }
  }
  comm::Work work = group_.reduce_scatter_async(part, whole, reduction_op(), place_.name);
  reduction_.emplace(Reduction{whole, part, std::move(work)});
}

void FlatBucket::finish_reduce() {
  if (!reduction_) return;
  const std::string label = "reduce.wait " + place_.name;
  const ProfileScope scope(label);
  reduction_->work.wait();
  at::Tensor part = reduction_->part;
  reduction_.reset();
  if (!options_.replicate_group) return begin_copy(part);
  comm::Work work = options_.replicate_group.all_reduce_async(part, reduction_op());
  replication_.emplace(Replication{part, std::move(work)});
}

void FlatBucket::finish_replication() {
  if (!replication_) return;
  replication_->work.wait();
  const at::Tensor part = replication_->part;
  replication_.reset();
  begin_copy(part);
}

void FlatBucket::begin_copy(const at::Tensor& reduced) {
  const at::NoGradGuard no_grad;
  const at::Tensor part = reduced.to(shard_.scalar_type());
  if (part.device() == shard_.device()) return keep_gradients(part);
  copied_ = at::empty(part.sizes(), part.options().device(at::kCPU).pinned_memory(true));
  copied_.copy_(part, /*non_blocking=*/true);
}

void FlatBucket::finish_copy() {
  if (copying()) keep_gradients(std::exchange(copied_, at::Tensor()));
}

void FlatBucket::keep_gradients(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const auto places = layout_.slices(group_.rank());
  began_.assign(local_shards_.size(), false);
  for (size_t i = 0; i < local_shards_.size(); ++i) {
    // libtorch's optimizers detach gradients in place.
    const at::Tensor piece =
        alias_of(part.narrow(0, places[i].offset, places[i].end - places[i].begin));
    at::Tensor& gradient = local_shards_[i].tensor.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(piece);
    } else {
      gradient = piece;
      began_[i] = true;
    }
  }
}

void FlatBucket::drop_unused(const int64_t* used) {
  const auto places = layout_.slices(group_.rank());
  for (size_t i = 0; i < local_shards_.size(); ++i)
    if (began_[i] && used[places[i].tensor] == 0) local_shards_[i].tensor.mutable_grad().reset();
  sent_.clear();
}

}  // namespace cohort::parallel
