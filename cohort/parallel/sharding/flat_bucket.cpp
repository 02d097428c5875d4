#include "cohort/parallel/sharding/flat_bucket.h"

#include <algorithm>
#include <c10/core/Allocator.h>
#include <torch/types.h>

namespace cohort::parallel {
namespace {

std::vector<FlatTensor> places_of(const std::vector<NamedTensor>& parameters) {
  std::vector<FlatTensor> places;
  for (const NamedTensor& each : parameters)
    places.push_back(
        {.name = each.name, .shape = each.tensor.sizes().vec(), .numel = each.tensor.numel()});
  return places;
}

// Memory leaves a tensor, and comes back, without its views' notice.
void set_memory(at::Tensor& tensor, size_t bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(bytes));
  storage->set_nbytes(bytes);
}

}  // namespace

FlatBucket::FlatBucket(std::vector<NamedTensor> parameters, comm::ProcessGroup& group,
                       const ShardingOptions& options)
    : group_(group),
      options_(options),
      parameters_(std::move(parameters)),
      frozen_(!parameters_.front().tensor.requires_grad()),
      layout_(places_of(parameters_), group.size()) {
  const at::NoGradGuard no_grad;
  const auto kept = parameters_.front().tensor.options().requires_grad(false);
  const auto computed = kept.dtype(options_.param_dtype.value_or(kept.dtype().toScalarType()));
  const int64_t first = group_.rank() * layout_.shard_numel();
  at::Tensor master = at::zeros({layout_.padded_numel()}, kept);
  for (size_t i = 0; i < parameters_.size(); ++i)
    view_of(master, layout_.tensors()[i]).copy_(parameters_[i].tensor);
  const bool own_memory = sharded() || computed.dtype() != kept.dtype();
  full_ = own_memory && computed.dtype() != kept.dtype() ? master.to(computed) : master;
  shard_ = master.narrow(0, first, layout_.shard_numel());
  if (own_memory) shard_ = shard_.clone();
  gathered_version_ = static_cast<int64_t>(shard_._version());
  for (size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].tensor.set_data(view_of(full_, layout_.tensors()[i]));

  for (const FlatSlice& slice : layout_.slices(group_.rank())) {
    const FlatTensor& place = layout_.tensors()[slice.tensor];
    at::Tensor tensor = shard_.narrow(0, slice.offset, slice.end - slice.begin);
    tensor.set_requires_grad(!frozen_);
    slices_.push_back({place.name, place.shape, slice.begin, slice.end, tensor});
  }
  free();
}

at::Tensor FlatBucket::view_of(const at::Tensor& flat, const FlatTensor& place) const {
  return flat.narrow(0, place.begin, place.numel).view(place.shape);
}

void FlatBucket::allocate() {
  if (present_) return;
  set_memory(full_, static_cast<size_t>(layout_.padded_numel()) * full_.element_size());
  present_ = true;
}

void FlatBucket::begin_gather() {
  if (whole_) return;
  const at::NoGradGuard no_grad;
  allocate();
  sent_ = shard_.to(full_.scalar_type());
  gathering_.emplace(group_.all_gather_into_async(full_, sent_));
  gathered_version_ = static_cast<int64_t>(shard_._version());
  whole_ = true;
}

void FlatBucket::gather() {
  begin_gather();
  if (!gathering_) return;
  gathering_->wait();
  gathering_.reset();
  sent_.reset();
}

void FlatBucket::free() {
  if (!sharded() || !present_) return;
  if (gathering_) gather();
  set_memory(full_, 0);
  present_ = whole_ = false;
}

void FlatBucket::keep_written() {
  const at::NoGradGuard no_grad;
  const int64_t first = group_.rank() * layout_.shard_numel();
  const at::Tensor own = full_.narrow(0, first, layout_.shard_numel());
  if (own.data_ptr() != shard_.data_ptr()) shard_.copy_(own);
  gathered_version_ = static_cast<int64_t>(shard_._version());
}

bool FlatBucket::has_gradients() const {
  return std::ranges::any_of(parameters_,
                             [](const auto& each) { return each.tensor.grad().defined(); });
}

void FlatBucket::begin_reduce() {
  const at::NoGradGuard no_grad;
  const auto type = options_.reduce_dtype.value_or(shard_.scalar_type());
  at::Tensor whole = gradients_;
  if (!whole.defined()) whole = at::empty({layout_.padded_numel()}, shard_.options().dtype(type));
  if (options_.shard == Shard::kOptimizer) gradients_ = whole;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor place = view_of(whole, layout_.tensors()[i]);
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined()) {
      place.zero_();
      continue;
    }
    TORCH_CHECK_VALUE(!gradient.is_sparse(), "sharding: ", parameters_[i].name,
                      " has a sparse gradient: expected dense ones");
    if (gradient.scalar_type() == type) {
      at::mul_out(place, gradient, at::scalar_tensor(1.0 / group_.size(), gradient.options()));
    } else {
      place.copy_(gradient);
      place.mul_(1.0 / group_.size());
    }
    gradient.reset();
  }
  whole.narrow(0, layout_.numel(), layout_.padded_numel() - layout_.numel()).zero_();
  at::Tensor part = at::empty({layout_.shard_numel()}, whole.options());
  comm::Work work = group_.reduce_scatter_async(part, whole);
  reduction_.emplace(Reduction{whole, part, std::move(work)});
}

void FlatBucket::finish_reduce() {
  if (!reduction_) return;
  const at::NoGradGuard no_grad;
  reduction_->work.wait();
  const at::Tensor part = reduction_->part.to(shard_.scalar_type());
  reduction_.reset();
  const bool adds = std::ranges::any_of(
      slices_, [](const ParameterSlice& slice) { return slice.tensor.grad().defined(); });
  if (adds) {
    shard_gradients_.add_(part);
  } else {
    shard_gradients_ = part;
  }
  const auto places = layout_.slices(group_.rank());
  for (size_t i = 0; i < slices_.size(); ++i) {
    slices_[i].tensor.mutable_grad() =
        shard_gradients_.narrow(0, places[i].offset, places[i].end - places[i].begin);
  }
}

}  // namespace cohort::parallel
